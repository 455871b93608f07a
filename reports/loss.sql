-- What was lost, why, and what did it cost? One row: tokens by cause, and prefill seconds by cause.
--
-- Loss = tokens that an unbounded cache would have served, less those that a tier did serve.
-- Parameter: $run, a run's id.
-- Traps:
--   * `total` comes from the tiers, the causes from the backend. An engine that does not say why puts all in `unknown`.
--   * The price of a request's loss is one figure; it is split over the causes in proportion to their tokens.
--   * `granularity` is never zero on a real engine: the last prompt token always runs.
--   * Only successful requests count. A NULL is unknown, not zero.
SELECT
  sum(loss_total)::BIGINT AS total,
  sum(lost_evicted)::BIGINT AS evicted,
  sum(lost_granularity)::BIGINT AS granularity,
  sum(lost_never_stored)::BIGINT AS never_stored,
  sum(lost_cold)::BIGINT AS cold,
  sum(lost_diverged)::BIGINT AS diverged,
  sum(lost_unknown)::BIGINT AS unknown,
  sum(recompute_s) AS recompute_s,
  sum(recompute_s * lost_evicted / nullif(loss_total, 0)) AS evicted_s,
  sum(recompute_s * lost_granularity / nullif(loss_total, 0)) AS granularity_s,
  sum(recompute_s * lost_never_stored / nullif(loss_total, 0)) AS never_stored_s,
  sum(recompute_s * lost_cold / nullif(loss_total, 0)) AS cold_s,
  sum(recompute_s * lost_diverged / nullif(loss_total, 0)) AS diverged_s,
  sum(recompute_s * lost_unknown / nullif(loss_total, 0)) AS unknown_s
FROM v_requests
WHERE run_id = $run AND status = 'ok'
