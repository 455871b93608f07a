-- Which turns changed most? Rows: the five that got faster and the five that got slower by most, largest first,
-- with what else changed for them.
--
-- Reads the temporary table `pairs` (compare_pairs.sql).
-- Traps:
--   * `computed`, `recompute_s` and `load_s` are the second run's less the first's. What they leave unexplained is
--     mostly waiting for other requests.
SELECT
  a_session AS session,
  a_turn AS turn,
  a_prompt_tokens AS prompt,
  a_pause AS pause,
  a_served_from AS a_served_from,
  b_served_from AS b_served_from,
  a_ttft AS a_ttft,
  b_ttft AS b_ttft,
  b_ttft - a_ttft AS difference,
  b_computed_tokens - a_computed_tokens AS computed,
  b_recompute_s - a_recompute_s AS recompute_s,
  b_load_s - a_load_s AS load_s
FROM pairs
WHERE b_ttft <> a_ttft
QUALIFY row_number() OVER (PARTITION BY b_ttft > a_ttft ORDER BY abs(b_ttft - a_ttft) DESC, a_session, a_turn) <= 5
ORDER BY b_ttft > a_ttft, abs(difference) DESC, session, turn
