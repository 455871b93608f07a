-- May the run be trusted? One row of counts that the verdict is made of.
--
-- Parameter: $run, a run's id.
-- Traps:
--   * `truncated` are prompts that the server counted more than 1 % shorter than the schedule meant them; chat templates
--     make prompts longer, never shorter.
--   * `unbalanced` are requests whose tiers do not sum to the prompt (or exceed it, where some tier is unknown), or
--     whose causes of loss do not sum to the loss.
--   * `warm` are requests that were served more tokens than the run itself had sent before, beyond one 256-token chunk:
--     something was in the cache already.
--   * `drift_p99` is due to sent: on a real clock the client's own delay, on the virtual clock 0.
WITH rows AS (SELECT * FROM v_requests WHERE run_id = $run),
served AS (
  SELECT
    *,
    coalesce(gpu_tokens, 0) + coalesce(cpu_tokens, 0) + coalesce(disk_tokens, 0) + coalesce(remote_tokens, 0)
      + coalesce(external_tokens, 0) + coalesce(computed_tokens, 0) AS tiers,
    coalesce(lost_evicted, lost_granularity, lost_never_stored, lost_cold, lost_diverged, lost_unknown) IS NOT NULL
      AS explained,
    coalesce(lost_evicted, 0) + coalesce(lost_granularity, 0) + coalesce(lost_never_stored, 0)
      + coalesce(lost_cold, 0) + coalesce(lost_diverged, 0) + coalesce(lost_unknown, 0) AS causes
  FROM rows
  WHERE status = 'ok'
), edges AS (
  SELECT sent AS at_s, 1 AS change FROM rows WHERE sent IS NOT NULL AND closed IS NOT NULL
  UNION ALL
  SELECT closed, -1 FROM rows WHERE sent IS NOT NULL AND closed IS NOT NULL
)
SELECT
  turns.*,
  ok.*,
  (SELECT error FROM rows WHERE error IS NOT NULL GROUP BY error ORDER BY count(*) DESC, error LIMIT 1) AS common_error,
  (SELECT max(depth) FROM (SELECT sum(change) OVER (ORDER BY at_s, change) AS depth FROM edges))::BIGINT AS peak_in_flight
FROM (
  SELECT
    count(*) AS turns,
    count(*) FILTER (status = 'ok') AS ok,
    count(*) FILTER (status = 'error') AS errors,
    count(*) FILTER (status = 'dropped') AS dropped,
    count(*) FILTER (status = 'cancelled') AS cancelled,
    count(*) - count(DISTINCT (session, turn)) AS repeated,
    quantile_cont(drift, 0.99) AS drift_p99
  FROM rows
) AS turns, (
  SELECT
    count(*) FILTER (prompt_tokens < 0.99 * planned_tokens) AS truncated,
    count(*) FILTER (
      tiers > prompt_tokens
      OR (computed_tokens IS NOT NULL AND tiers <> prompt_tokens)
      OR (explained AND causes <> loss_total)
    ) AS unbalanced,
    count(*) FILTER (served_tokens > ideal_tokens + 256) AS warm,
    count(*) FILTER (served_tokens IS NULL) AS unattributed,
    count(ttft) AS timed
  FROM served
) AS ok
