-- Which sessions lost most? Rows: the ten sessions with the most tokens lost, worst first.
--
-- Parameter: $run, a run's id.
-- Traps:
--   * Where the backend does not say what was served, `lost` is NULL and the order is by the slowest first token.
--   * A '#n' at the end of a session's id marks the n-th clone of a session of the trace.
--   * A session that failed early shows few requests: `failed` counts errors and the turns dropped after them,
--     not those that --too-long drop left out (see checks.sql).
SELECT
  session,
  count(*) FILTER (status = 'ok') AS requests,
  count(*) FILTER (status = 'error' OR (status = 'dropped' AND NOT left_out)) AS failed,
  sum(prompt_tokens) FILTER (status = 'ok')::BIGINT AS prompt,
  sum(ideal_tokens) FILTER (status = 'ok')::BIGINT AS ideal,
  sum(loss_total) FILTER (status = 'ok')::BIGINT AS lost,
  sum(lost_evicted) FILTER (status = 'ok')::BIGINT AS evicted,
  sum(recompute_s) FILTER (status = 'ok') AS recompute_s,
  max(ttft) FILTER (status = 'ok') AS ttft_max
FROM (
  SELECT
    *,
    coalesce(error, '') LIKE 'prompt and output of %'
      OR coalesce(error, '') LIKE 'not sent: %, which was dropped' AS left_out
  FROM v_requests
  WHERE run_id = $run
)
GROUP BY session
ORDER BY lost DESC NULLS LAST, ttft_max DESC NULLS LAST, session
LIMIT 10
