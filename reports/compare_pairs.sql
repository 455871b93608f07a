-- The same turn in two runs is one pair. Rows: the turns that both runs answered, the compared columns of
-- v_requests with a_ and b_ before their names, and the groups that the turn belongs to.
--
-- Parameters: $a and $b, ids of runs. `replay compare` keeps the rows as the temporary table `pairs`, which the
-- other compare_*.sql files read.
-- Traps:
--   * A turn that only one run answered is no pair: read compare_counts.sql first, for failures flatter.
--   * The reusable prefix (ideal_tokens) is the first run's: the second may have sent its requests in another order.
--   * Groups are numbers, so that they sort; compare_groups.sql names them. NULL = in no group of that kind.
WITH a AS (
  SELECT COLUMNS('^(session|turn|position|pause|served_from|preemptions|ttft|ttft_due|e2e|itl|l.*|.*_tokens|.*_s)$') AS 'a_\1'
  FROM v_requests
  WHERE run_id = $a AND status = 'ok'
), b AS (
  SELECT COLUMNS('^(session|turn|served_from|preemptions|ttft|ttft_due|e2e|itl|l.*|.*_tokens|.*_s)$') AS 'b_\1'
  FROM v_requests
  WHERE run_id = $b AND status = 'ok'
), numbers AS (
  SELECT session, row_number() OVER (ORDER BY session) - 1 AS session_number
  FROM (SELECT DISTINCT a_session AS session FROM a JOIN b ON a_session = b_session AND a_turn = b_turn)
)
SELECT
  * EXCLUDE (session, b_session, b_turn),
  CASE
    WHEN a_ideal_tokens IS NULL THEN NULL
    WHEN a_ideal_tokens < 1 THEN 1
    WHEN a_ideal_tokens < 8192 THEN 2
    WHEN a_ideal_tokens < 32768 THEN 3
    WHEN a_ideal_tokens < 65536 THEN 4
    WHEN a_ideal_tokens < 131072 THEN 5
    ELSE 6
  END AS prefix_group,
  CASE
    WHEN a_position = 0 OR a_pause IS NULL THEN NULL
    WHEN a_pause < 1 THEN 1
    WHEN a_pause < 10 THEN 2
    WHEN a_pause < 60 THEN 3
    WHEN a_pause < 300 THEN 4
    WHEN a_pause < 3600 THEN 5
    ELSE 6
  END AS pause_group,
  CASE
    WHEN a_position IS NULL THEN NULL
    WHEN a_position < 1 THEN 1
    WHEN a_position < 5 THEN 2
    WHEN a_position < 20 THEN 3
    WHEN a_position < 50 THEN 4
    ELSE 5
  END AS position_group,
  10 * list_position(['gpu', 'cpu', 'disk', 'remote', 'external', 'none'], a_served_from)
    + list_position(['gpu', 'cpu', 'disk', 'remote', 'external', 'none'], b_served_from) AS served_from_group
FROM a
JOIN b ON a_session = b_session AND a_turn = b_turn
JOIN numbers ON session = a_session
ORDER BY session_number, a_turn
