-- Which kinds of turns got faster, and which slower? Rows: kind of grouping, group; pairs, how many got better or
-- worse, means of TTFT in both runs.
--
-- Reads the temporary table `pairs` (compare_pairs.sql).
-- Traps:
--   * Better or worse: TTFT changed by more than 5 % and by more than 1 ms. The rest are `same`.
--   * A group is one way to cut all pairs; the four ways overlap, their differences do not add up.
--   * `served_from` pairs the slowest tier touched in the first run with that in the second: 'gpu > disk'.
SELECT
  "by",
  number,
  CASE "by"
    WHEN 'prefix' THEN ['none', '< 8 k', '8-32 k', '32-64 k', '64-128 k', '> 128 k'][number]
    WHEN 'pause' THEN ['< 1 s', '1-10 s', '10-60 s', '1-5 min', '5-60 min', '> 1 h'][number]
    WHEN 'position' THEN ['first turn', 'turns 2-5', 'turns 6-20', 'turns 21-50', 'later'][number]
    ELSE ['gpu', 'cpu', 'disk', 'remote', 'external', 'none'][number // 10] || ' > '
      || ['gpu', 'cpu', 'disk', 'remote', 'external', 'none'][number % 10]
  END AS "group",
  count(*) AS n,
  count(*) FILTER (changed AND b_ttft < a_ttft) AS better,
  count(*) FILTER (changed AND b_ttft > a_ttft) AS worse,
  avg(a_ttft) AS a_mean,
  avg(b_ttft) AS b_mean
FROM (
  SELECT
    unnest(['prefix', 'pause', 'served_from', 'position']) AS "by",
    unnest([prefix_group, pause_group, served_from_group, position_group]) AS number,
    a_ttft,
    b_ttft,
    abs(b_ttft - a_ttft) > greatest(0.05 * a_ttft, 0.001) AS changed
  FROM pairs
  WHERE a_ttft IS NOT NULL AND b_ttft IS NOT NULL
)
WHERE number IS NOT NULL
GROUP BY "by", number
ORDER BY list_position(['prefix', 'pause', 'served_from', 'position'], "by"), number
