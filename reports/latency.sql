-- How long did requests take, by the slowest tier that served their prompt? Rows: metric, served_from ('all' first).
--
-- ttft_s from sent to first token; ttft_due_s from due, so that the client's own delay counts too;
-- e2e_s from sent to last token; itl_s = mean time between two output tokens of one request.
-- Parameter: $run, a run's id.
-- Traps:
--   * Percentiles interpolate linearly between order statistics (quantile_cont; numpy's default). One that n cannot
--     support is NULL: p90 below 10 requests, p95 below 20, p99 below 100.
--   * Successful requests only. Failures make a server look fast: read the number of errors first.
--   * `served_from` says which tier was touched, not how much it served: compare rows only for similar prompts.
--     'none' = nothing was reused; 'unknown' = the engine does not say.
WITH samples AS (
  SELECT
    coalesce(served_from, 'unknown') AS served_from,
    unnest(['ttft_s', 'ttft_due_s', 'e2e_s', 'itl_s']) AS metric,
    unnest([ttft, ttft_due, e2e, itl]) AS seconds
  FROM v_requests
  WHERE run_id = $run AND status = 'ok'
), cells AS (
  SELECT
    metric,
    coalesce(served_from, 'all') AS served_from,
    count(seconds) AS n,
    avg(seconds) AS mean,
    quantile_cont(seconds, [0.5, 0.9, 0.95, 0.99]) AS q
  FROM samples
  WHERE seconds IS NOT NULL
  GROUP BY GROUPING SETS ((metric, served_from), (metric))
)
SELECT
  metric,
  served_from,
  n,
  mean,
  q[1] AS p50,
  CASE WHEN n >= 10 THEN q[2] END AS p90,
  CASE WHEN n >= 20 THEN q[3] END AS p95,
  CASE WHEN n >= 100 THEN q[4] END AS p99
FROM cells
ORDER BY
  list_position(['ttft_s', 'ttft_due_s', 'e2e_s', 'itl_s'], metric),
  list_position(['all', 'gpu', 'cpu', 'disk', 'remote', 'external', 'none', 'unknown'], served_from)
