-- May the run be trusted? One row of counts that the verdict is made of.
--
-- Parameter: $run, a run's id.
-- Traps:
--   * `truncated` are prompts that the server counted more than 1 % shorter than the schedule meant them; chat templates
--     make prompts longer, never shorter.
--   * `unbalanced` are requests whose tiers do not sum to the prompt (or exceed it, where some tier is unknown), or
--     whose causes of loss do not sum to the loss. Cached tokens of which no tier is known (`unnamed_tokens`) balance.
--   * `warm` are requests that were served more tokens than the run itself had sent before, beyond one 256-token chunk:
--     something was in the cache already. Not those that waited while a later one was answered: what all of a start's
--     sessions share is computed by whichever comes first, not by whichever was due first.
--   * `too_long` and `after_too_long` are the rows of `dropped` that --too-long drop left out, and those that depend on
--     them: the user's choice, told by the driver's words. The rest of `dropped` depends on a request that failed.
--   * `repeated` are turns with more than one row, told by a 64-bit hash. `common_error` is the most frequent one.
--   * `drift_p99` is due to sent: on a real clock the client's own delay, on the virtual clock 0.
WITH turns AS (
  SELECT
    count(*) AS turns,
    count(*) FILTER (status = 'ok') AS ok,
    count(*) FILTER (status = 'error') AS errors,
    count(*) FILTER (status = 'dropped') AS dropped,
    count(*) FILTER (status = 'dropped' AND error LIKE 'prompt and output of %') AS too_long,
    count(*) FILTER (status = 'dropped' AND error LIKE 'not sent: %, which was dropped') AS after_too_long,
    count(*) FILTER (status = 'cancelled') AS cancelled,
    count(*) - count(DISTINCT hash(session, turn)) AS repeated,
    quantile_cont(drift, 0.99) AS drift_p99
  FROM v_requests
  WHERE run_id = $run
), sums AS (
  SELECT
    planned_tokens,
    prompt_tokens,
    ideal_tokens,
    computed_tokens,
    served_tokens,
    loss_total,
    ttft,
    coalesce(gpu_tokens, 0) + coalesce(cpu_tokens, 0) + coalesce(disk_tokens, 0) + coalesce(remote_tokens, 0)
      + coalesce(external_tokens, 0) + coalesce(unnamed_tokens, 0) + coalesce(computed_tokens, 0) AS tiers,
    coalesce(lost_evicted, lost_granularity, lost_never_stored, lost_cold, lost_diverged, lost_unknown) IS NOT NULL
      AS explained,
    coalesce(lost_evicted, 0) + coalesce(lost_granularity, 0) + coalesce(lost_never_stored, 0)
      + coalesce(lost_cold, 0) + coalesce(lost_diverged, 0) + coalesce(lost_unknown, 0) AS causes
  FROM v_requests
  WHERE run_id = $run AND status = 'ok'
), answers AS (
  SELECT
    count(*) FILTER (prompt_tokens < 0.99 * planned_tokens) AS truncated,
    count(*) FILTER (
      tiers > prompt_tokens
      OR (computed_tokens IS NOT NULL AND tiers <> prompt_tokens)
      OR (explained AND causes <> loss_total)
    ) AS unbalanced,
    count(*) FILTER (served_tokens IS NULL) AS unattributed,
    count(ttft) AS timed
  FROM sums
), richer AS (
  SELECT due, first_token FROM v_requests
  WHERE run_id = $run AND status = 'ok' AND served_tokens > ideal_tokens + 256
), warmth AS (
  SELECT count(*) AS warm
  FROM richer AS one
  WHERE NOT EXISTS (
    SELECT 1 FROM requests AS other
    WHERE other.run_id = $run AND other.sent >= one.due AND other.first_token < one.first_token
  )
), edges AS (
  SELECT sent AS moment, 1 AS change FROM requests WHERE run_id = $run AND sent <= closed
  UNION ALL
  SELECT closed, -1 FROM requests WHERE run_id = $run AND sent <= closed
), flight AS (
  SELECT max(depth)::BIGINT AS peak_in_flight
  FROM (SELECT sum(change) OVER (ORDER BY moment, change ROWS UNBOUNDED PRECEDING) AS depth FROM edges)
), failure AS (
  SELECT any_value(error ORDER BY n DESC, error) AS common_error
  FROM (SELECT error, count(*) AS n FROM requests WHERE run_id = $run AND status = 'error' GROUP BY error)
)
SELECT * FROM turns, answers, warmth, flight, failure
