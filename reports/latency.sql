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
WITH groups AS (
  SELECT
    CASE WHEN grouping(served_from) = 1 THEN 'all' ELSE coalesce(served_from, 'unknown') END AS served_from,
    [count(ttft), count(ttft_due), count(e2e), count(itl)] AS n,
    [avg(ttft), avg(ttft_due), avg(e2e), avg(itl)] AS mean,
    [quantile_cont(ttft, [0.5, 0.9, 0.95, 0.99]), quantile_cont(ttft_due, [0.5, 0.9, 0.95, 0.99]),
     quantile_cont(e2e, [0.5, 0.9, 0.95, 0.99]), quantile_cont(itl, [0.5, 0.9, 0.95, 0.99])] AS q
  FROM v_requests
  WHERE run_id = $run AND status = 'ok'
  GROUP BY GROUPING SETS ((served_from), ())
), cells AS (
  SELECT
    unnest(['ttft_s', 'ttft_due_s', 'e2e_s', 'itl_s']) AS metric,
    served_from,
    unnest(n) AS n,
    unnest(mean) AS mean,
    unnest(q) AS q
  FROM groups
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
WHERE n > 0
ORDER BY
  list_position(['ttft_s', 'ttft_due_s', 'e2e_s', 'itl_s'], metric),
  list_position(['all', 'gpu', 'cpu', 'disk', 'remote', 'external', 'none', 'unknown'], served_from)
