-- Which pause lengths cost evictions? Rows: pauses by length, with what was reusable and what was gone.
--
-- Parameter: $run, a run's id.
-- Traps:
--   * The pause is the trace's, from the end of the turns that a request waits for. First turns of sessions have no
--     pause of their own and stand in a row of their own, so that the rows add up to the run's.
--   * Only evictions are a matter of time. `lost` holds every cause.
--   * --speed divides pauses before they are stored; --skip-idle does not, and leaves less time pass than they say.
--   * p50 of TTFT mixes prompt lengths: longer pauses often come with longer prompts.
SELECT
  bin,
  count(*) AS requests,
  sum(ideal_tokens)::BIGINT AS ideal,
  sum(loss_total)::BIGINT AS lost,
  sum(lost_evicted)::BIGINT AS evicted,
  count(*) FILTER (lost_evicted > 0) AS hit_by_eviction,
  sum(recompute_s) AS recompute_s,
  quantile_cont(ttft, 0.5) AS ttft_p50
FROM (
  SELECT
    *,
    CASE
      WHEN position = 0 OR pause IS NULL THEN 1
      WHEN pause < 1 THEN 2
      WHEN pause < 10 THEN 3
      WHEN pause < 60 THEN 4
      WHEN pause < 300 THEN 5
      WHEN pause < 3600 THEN 6
      ELSE 7
    END AS number,
    ['first turn', '< 1 s', '1-10 s', '10-60 s', '1-5 min', '5-60 min', '> 1 h'][number] AS bin
  FROM v_requests
  WHERE run_id = $run AND status = 'ok'
)
GROUP BY number, bin
ORDER BY number
