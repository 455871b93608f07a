-- What did each tier deliver, and how fast? Rows: tier, requests that read from it, tokens, bytes, seconds, GB/s.
--
-- Parameter: $run, a run's id. Bytes = tokens x runs.settings.kv_bytes_per_token (all layers, keys and values).
-- Traps:
--   * A tier that the backend lacks or cannot see is absent, which is not the same as zero loads.
--   * A request's load time is one figure. `seconds` and `gb_per_s` are taken from the `timed` requests: those that
--     read from this tier alone, beside the GPU. NULL where there are none, and always for the GPU, which loads nothing.
--   * `gb_per_s` (10^9 bytes) is what a request saw, waiting and software cost included: less than the link's bandwidth,
--     and the link's bandwidth shared by requests that load at once.
WITH settings AS (
  SELECT TRY_CAST(settings ->> '$.kv_bytes_per_token' AS DOUBLE) AS kv_bytes FROM runs WHERE id = $run
), parts AS (
  SELECT
    unnest(['gpu', 'cpu', 'disk', 'remote', 'external']) AS tier,
    unnest([gpu_tokens, cpu_tokens, disk_tokens, remote_tokens, external_tokens]) AS tokens,
    load_s,
    (coalesce(cpu_tokens, 0) > 0)::INT + (coalesce(disk_tokens, 0) > 0)::INT + (coalesce(remote_tokens, 0) > 0)::INT
      + (coalesce(external_tokens, 0) > 0)::INT AS lower_tiers
  FROM requests
  WHERE run_id = $run AND status = 'ok'
), sums AS (
  SELECT
    tier,
    count(*) FILTER (tokens > 0) AS loads,
    sum(tokens)::BIGINT AS tokens,
    count(*) FILTER (timed) AS timed,
    sum(tokens) FILTER (timed)::BIGINT AS timed_tokens,
    sum(load_s) FILTER (timed) AS seconds
  FROM (SELECT *, tier <> 'gpu' AND tokens > 0 AND lower_tiers = 1 AND load_s IS NOT NULL AS timed FROM parts)
  WHERE tokens IS NOT NULL
  GROUP BY tier
)
SELECT
  tier,
  loads,
  tokens,
  (tokens * kv_bytes)::BIGINT AS bytes,
  timed,
  seconds,
  timed_tokens * kv_bytes / nullif(seconds, 0) / 1e9 AS gb_per_s
FROM sums, settings
ORDER BY list_position(['gpu', 'cpu', 'disk', 'remote', 'external'], tier)
