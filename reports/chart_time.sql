-- What served and what lost prompt tokens, as the run went on: 72 equal stretches of it, a row for each part.
--
-- Parameter: $run, a run's id.
-- Traps:
--   * A request counts where it was sent, with all of its tokens, however long it took.
--   * Parts of a stretch sum to its prompt tokens. `new` is what no cache could have had; `computed` is prefill of
--     requests whose ideal reuse is unknown; `unnamed` is cached in an unknown tier; `unknown` is what nobody accounts for.
--   * Successful requests only. A part of no tokens has no row, nor has a stretch without requests.
WITH span AS (
  SELECT greatest(max(sent), 1e-6) / 72 AS seconds FROM requests WHERE run_id = $run AND status = 'ok'
), turns AS (
  SELECT
    least(71, floor(sent / seconds)) AS number,
    seconds,
    *,
    prompt_tokens - served_tokens - loss_total AS fresh
  FROM v_requests, span
  WHERE run_id = $run AND status = 'ok' AND sent IS NOT NULL
), sums AS (
  SELECT
    number * seconds AS start,
    (number + 1) * seconds AS stop,
    count(*) AS requests,
    unnest(['gpu', 'cpu', 'disk', 'remote', 'external', 'unnamed', 'evicted', 'lost', 'new', 'computed', 'unknown']) AS part,
    unnest([
      sum(gpu_tokens),
      sum(cpu_tokens),
      sum(disk_tokens),
      sum(remote_tokens),
      sum(external_tokens),
      sum(unnamed_tokens),
      sum(lost_evicted),
      sum(loss_total - coalesce(lost_evicted, 0)),
      sum(fresh),
      sum(prompt_tokens - served_tokens) FILTER (loss_total IS NULL),
      sum(prompt_tokens) FILTER (served_tokens IS NULL)
    ])::BIGINT AS tokens
  FROM turns
  GROUP BY number, seconds
)
SELECT * FROM sums WHERE tokens > 0 ORDER BY start, part
