-- Do the requests' tokens agree with the engine's own counters? Rows: kind of tokens, by how much the engine's counter
-- grew over the run, the sum over the requests, and how many requests there were.
--
-- Parameter: $run, a run's id. No rows without scrapes, or where the engine has none of these counters (vLLM has them).
-- `lower` is what came from beyond the GPU, whatever the tier.
-- Traps:
--   * A restart by replay itself stands among the scrapes as 'replay:restarted', with a scrape just before and one after:
--     what the engine counts for itself until it is ready again is left out.
--   * `engine` is NULL where a counter fell otherwise: a restart lost what it had counted since the scrape before.
--   * `requests` is NULL where some request failed, was cancelled or was sent more than once, for the engine may have
--     counted it; and where some request does not say.
--   * vLLM's prefix_cache_hits is not among them: it counts a waiting request again each time the scheduler looks at it.
WITH scraped AS (
  SELECT
    *,
    regexp_replace(name, '_total$', '') AS counter,
    -- Instances are scraped one by one.
    regexp_extract(coalesce(labels, ''), 'instance="(\d+)"', 1) AS instance
  FROM scrapes
  WHERE run_id = $run
), numbered AS (
  SELECT *, count(*) FILTER (counter = 'replay:restarted') OVER (PARTITION BY instance ORDER BY "at") AS restarts
  FROM scraped
), samples AS (
  SELECT
    CASE
      WHEN counter = 'vllm:prompt_tokens' THEN 'prompt'
      WHEN counter = 'vllm:prompt_tokens_cached' THEN 'cached'
      WHEN counter = 'vllm:prompt_tokens_by_source' AND labels LIKE '%source="local_cache_hit"%' THEN 'gpu'
      WHEN counter = 'vllm:prompt_tokens_by_source' AND labels LIKE '%source="external_kv_transfer"%' THEN 'lower'
      WHEN counter = 'vllm:prompt_tokens_by_source' AND labels LIKE '%source="local_compute"%' THEN 'computed'
    END AS kind,
    labels,
    "at",
    value,
    restarts,
    min("at") OVER (PARTITION BY instance, restarts) AS first_at
  FROM numbered
  WHERE counter <> 'replay:restarted'
), steps AS (
  SELECT
    kind,
    value,
    -- A counter that appears later started at 0: exporters create labelled counters at first use.
    lag(value, 1, CASE WHEN "at" = first_at THEN value ELSE 0 END)
      OVER (PARTITION BY kind, labels, restarts ORDER BY "at") AS before
  FROM samples
  WHERE kind IS NOT NULL
), engine AS (
  SELECT kind, CASE WHEN bool_and(value >= before) THEN sum(value - before) END::BIGINT AS engine
  FROM steps
  GROUP BY kind
), turns AS (
  SELECT
    *,
    CASE WHEN gpu_tokens IS NOT NULL THEN served_tokens - gpu_tokens END AS lower_tokens
  FROM v_requests
  WHERE run_id = $run AND status <> 'dropped'
), asked AS (
  SELECT
    count(*) AS n,
    bool_and(status = 'ok' AND coalesce(attempts, 1) = 1) AS once,
    unnest(['prompt', 'cached', 'gpu', 'lower', 'computed']) AS kind,
    unnest([sum(prompt_tokens), sum(served_tokens), sum(gpu_tokens), sum(lower_tokens), sum(computed_tokens)]) AS tokens,
    unnest([count(prompt_tokens), count(served_tokens), count(gpu_tokens), count(lower_tokens), count(computed_tokens)])
      = count(*) AS complete
  FROM turns
)
SELECT kind, engine, CASE WHEN once AND complete THEN tokens END::BIGINT AS requests, n
FROM engine
JOIN asked USING (kind)
ORDER BY list_position(['prompt', 'cached', 'gpu', 'lower', 'computed'], kind)
