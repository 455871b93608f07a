-- What each tier evicted as the run went on: 72 equal stretches of it. Rows: stretch and tier.
--
-- Parameter: $run, a run's id.
-- Traps:
--   * Empty where the engine does not report its cache events; that is not the same as no evictions.
--   * An eviction is not a loss: many of the tokens are never asked for again, or a lower tier still has them.
WITH span AS (
  SELECT greatest(max("at"), 1e-6) / 72 AS seconds FROM cache_events WHERE run_id = $run
)
SELECT start, start + seconds AS stop, part, sum(tokens)::BIGINT AS tokens, sum(blocks)::BIGINT AS blocks
FROM (
  SELECT
    least(71, floor("at" / seconds)) * seconds AS start,
    seconds,
    coalesce(tier, 'unknown') AS part,
    tokens,
    blocks
  FROM cache_events, span
  WHERE run_id = $run AND kind = 'evict'
)
GROUP BY start, seconds, part
ORDER BY start, part
