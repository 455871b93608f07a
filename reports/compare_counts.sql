-- Which turns can be compared? One row: turns that both runs answered, and those that fell out and why.
--
-- Parameters: $a and $b, ids of runs.
-- Traps:
--   * Percentiles of pairs leave out what either run failed to answer. Where `only_a_ok` and `only_b_ok` differ much,
--     the run that failed more looks faster than it is.
SELECT
  count(*) FILTER (a.status = 'ok' AND b.status = 'ok') AS pairs,
  count(*) FILTER (a.status = 'ok' AND b.status <> 'ok') AS only_a_ok,
  count(*) FILTER (b.status = 'ok' AND a.status <> 'ok') AS only_b_ok,
  count(*) FILTER (a.status <> 'ok' AND b.status <> 'ok') AS neither_ok,
  count(*) FILTER (b.status IS NULL) AS missing_in_b,
  count(*) FILTER (a.status IS NULL) AS missing_in_a
FROM (SELECT session, turn, status FROM requests WHERE run_id = $a) AS a
FULL JOIN (SELECT session, turn, status FROM requests WHERE run_id = $b) AS b USING (session, turn)
