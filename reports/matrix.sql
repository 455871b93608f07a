-- How do many runs compare, and which operating point is best? Rows: run, in the order they were started.
--
-- Parameter: $runs, a list of ids of runs.
-- Traps:
--   * Latencies are of the successful requests: a run with errors looks faster than it is, read error_share first.
--   * error_share is of the turns that --too-long drop did not leave out (see checks.sql).
--   * A percentile that n cannot support is NULL: p90 below 10 requests, p95 below 20, p99 below 100.
--   * Throughput is requests over the whole run, pauses, ramp-up and drain included. With sessions at their recorded
--     times (concurrency NULL) it says what was asked, not what was possible.
--   * Shares are of the prompt tokens; loss_share is of the tokens that an unbounded cache would have served.
SELECT
  runs.id AS run,
  any_value(name) AS name,
  any_value(backend) AS backend,
  any_value(concurrency) AS concurrency,
  any_value(settings -> '$.sweep.set')::VARCHAR[] AS "set",
  any_value(simulated) AS simulated,
  any_value(runs.status) AS status,
  any_value(verdict) AS verdict,
  any_value(duration_s) AS duration_s,
  count(*) FILTER (ok) AS n,
  count(*) FILTER (r.status IN ('error', 'dropped') AND NOT left_out)
    / nullif(count(*) FILTER (r.status <> 'cancelled' AND NOT left_out), 0)
    AS error_share,
  avg(ttft) FILTER (ok) AS ttft_mean,
  quantile_cont(ttft, 0.5) FILTER (ok) AS ttft_p50,
  CASE WHEN n >= 10 THEN quantile_cont(ttft, 0.9) FILTER (ok) END AS ttft_p90,
  CASE WHEN n >= 20 THEN quantile_cont(ttft, 0.95) FILTER (ok) END AS ttft_p95,
  CASE WHEN n >= 100 THEN quantile_cont(ttft, 0.99) FILTER (ok) END AS ttft_p99,
  quantile_cont(e2e, 0.5) FILTER (ok) AS e2e_p50,
  CASE WHEN n >= 20 THEN quantile_cont(e2e, 0.95) FILTER (ok) END AS e2e_p95,
  quantile_cont(itl, 0.5) FILTER (ok) AS itl_p50,
  n / nullif(any_value(duration_s), 0) AS throughput,
  sum(output_tokens) FILTER (ok) / nullif(any_value(duration_s), 0) AS output_tokens_per_s,
  sum(served_tokens) FILTER (ok) / nullif(sum(prompt_tokens) FILTER (ok), 0) AS hit_share,
  sum(gpu_tokens) FILTER (ok) / nullif(sum(prompt_tokens) FILTER (ok), 0) AS gpu_share,
  sum(cpu_tokens) FILTER (ok) / nullif(sum(prompt_tokens) FILTER (ok), 0) AS cpu_share,
  sum(disk_tokens) FILTER (ok) / nullif(sum(prompt_tokens) FILTER (ok), 0) AS disk_share,
  sum(remote_tokens) FILTER (ok) / nullif(sum(prompt_tokens) FILTER (ok), 0) AS remote_share,
  sum(external_tokens) FILTER (ok) / nullif(sum(prompt_tokens) FILTER (ok), 0) AS external_share,
  sum(computed_tokens) FILTER (ok) / nullif(sum(prompt_tokens) FILTER (ok), 0) AS computed_share,
  sum(loss_total) FILTER (ok) / nullif(sum(ideal_tokens) FILTER (ok), 0) AS loss_share
FROM runs
JOIN (
  SELECT
    *,
    status = 'ok' AS ok,
    status = 'dropped' AND (
      coalesce(error, '') LIKE 'prompt and output of %' OR coalesce(error, '') LIKE 'not sent: %, which was dropped'
    ) AS left_out
  FROM v_requests
  WHERE list_contains($runs, run_id)
) AS r ON r.run_id = runs.id
GROUP BY runs.id
ORDER BY any_value(started_at), runs.id
