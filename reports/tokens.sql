-- Where did every prompt token come from? One row: tokens of the successful requests, by tier.
--
-- Parameter: $run, a run's id.
-- Traps:
--   * A tier is NULL when no request of the run says anything about it: the backend lacks it or cannot see it.
--   * `unnamed` are cached tokens of requests of which no tier is known. `unknown` are prompt tokens that no column
--     accounts for. The tiers, `unnamed`, `computed` and `unknown` sum to `prompt`.
--   * `ideal` is a property of the trace and of the order in which requests were sent, not of the backend.
SELECT
  count(*) AS requests,
  sum(prompt_tokens)::BIGINT AS prompt,
  sum(output_tokens)::BIGINT AS output,
  sum(ideal_tokens)::BIGINT AS ideal,
  sum(gpu_tokens)::BIGINT AS gpu,
  sum(cpu_tokens)::BIGINT AS cpu,
  sum(disk_tokens)::BIGINT AS disk,
  sum(remote_tokens)::BIGINT AS remote,
  sum(external_tokens)::BIGINT AS external,
  sum(unnamed_tokens)::BIGINT AS unnamed,
  sum(computed_tokens)::BIGINT AS computed,
  (prompt - coalesce(gpu, 0) - coalesce(cpu, 0) - coalesce(disk, 0) - coalesce(remote, 0) - coalesce(external, 0)
    - coalesce(unnamed, 0) - coalesce(computed, 0))::BIGINT AS unknown
FROM v_requests
WHERE run_id = $run AND status = 'ok'
