-- Which pause lengths cost evictions? Rows: pauses by length, with what was reusable and what was gone.
--
-- Parameter: $run, a run's id.
-- Traps:
--   * The pause is the trace's, from the end of the turns that a request waits for. A first turn of a session has no
--     pause of its own and is left out.
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
      WHEN pause < 1 THEN 1
      WHEN pause < 10 THEN 2
      WHEN pause < 60 THEN 3
      WHEN pause < 300 THEN 4
      WHEN pause < 3600 THEN 5
      ELSE 6
    END AS number,
    ['< 1 s', '1-10 s', '10-60 s', '1-5 min', '5-60 min', '> 1 h'][number] AS bin
  FROM v_requests
  WHERE run_id = $run AND status = 'ok' AND position > 0 AND pause IS NOT NULL
)
GROUP BY number, bin
ORDER BY number
