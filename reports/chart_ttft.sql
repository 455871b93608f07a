-- Points of the cumulative distribution of TTFT, a curve for each `served_from` and for all: rows of seconds and share.
--
-- Parameter: $run, a run's id.
-- Traps:
--   * `share` is exact at each row: that share of the group's `n` requests had a first token within `ttft` seconds.
--     Of more than 200 requests, about every n/200th is given.
--   * Successful requests only. `served_from` says which tier was touched, not how much it served.
WITH times AS (
  SELECT unnest([coalesce(served_from, 'unknown'), 'all']) AS served_from, ttft
  FROM v_requests
  WHERE run_id = $run AND status = 'ok' AND ttft > 0
), ranks AS (
  SELECT
    *,
    row_number() OVER (PARTITION BY served_from ORDER BY ttft) AS rank,
    count(*) OVER (PARTITION BY served_from) AS n
  FROM times
)
SELECT served_from, n, ttft, rank / n AS share
FROM ranks
WHERE rank IN (1, n) OR rank * 200 // n > (rank - 1) * 200 // n
ORDER BY list_position(['gpu', 'cpu', 'disk', 'remote', 'external', 'none', 'unknown', 'all'], served_from), rank
