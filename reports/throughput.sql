-- How much work was done per second? One row.
--
-- Parameter: $run, a run's id.
-- Traps:
--   * The time is the whole run's, ramp-up and drain included, up to the last response where the run did not end.
--   * An open-loop run cannot be faster than its trace: throughput then says what was asked, not what was possible.
--   * `prompt_tokens_per_s` counts cached tokens too; `computed_tokens_per_s` is what prefill really did.
--   * Successful requests only.
WITH run AS (
  SELECT coalesce(
    (SELECT duration_s FROM runs WHERE id = $run),
    (SELECT max(closed) FROM requests WHERE run_id = $run)
  ) AS seconds
)
SELECT
  any_value(run.seconds) AS seconds,
  count(*) / nullif(any_value(run.seconds), 0) AS requests_per_s,
  sum(output_tokens) / nullif(any_value(run.seconds), 0) AS output_tokens_per_s,
  sum(prompt_tokens) / nullif(any_value(run.seconds), 0) AS prompt_tokens_per_s,
  sum(computed_tokens) / nullif(any_value(run.seconds), 0) AS computed_tokens_per_s
FROM requests, run
WHERE run_id = $run AND status = 'ok'
