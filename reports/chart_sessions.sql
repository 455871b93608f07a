-- Sessions as lanes: when each asked, and where its prompts came from. Rows: lane and stretch of the run.
--
-- Parameter: $run, a run's id.
-- Traps:
--   * At most 16 sessions: the 8 that lost most (`worst`), and 8 of the others, evenly spaced by their start. `sessions`
--     is how many the run has. Where losses are unknown, the slowest first token decides.
--   * A row sums the requests that the session sent in one of 180 equal stretches of the run; `start` and `stop` are
--     when the first of them was sent and the last one closed, so a gap between rows is a pause.
--   * `new` is what no cache could have had; it is NULL where losses are unknown.
WITH span AS (
  SELECT greatest(max(sent), 1e-6) / 180 AS seconds FROM requests WHERE run_id = $run AND status = 'ok'
), ranked AS (
  SELECT
    session,
    min(sent) AS begins,
    sum(loss_total) AS session_loss,
    row_number() OVER (ORDER BY sum(loss_total) DESC NULLS LAST, max(ttft) DESC NULLS LAST, session) AS place,
    count(*) OVER () AS sessions
  FROM v_requests
  WHERE run_id = $run AND status = 'ok' AND sent IS NOT NULL
  GROUP BY session
), spread AS (
  SELECT *, place <= 8 AS worst, row_number() OVER (PARTITION BY place <= 8 ORDER BY begins, session) AS turn_in_line
  FROM ranked
), lanes AS (
  SELECT *, row_number() OVER (ORDER BY worst DESC, CASE WHEN worst THEN place ELSE turn_in_line END) AS lane
  FROM spread
  WHERE worst OR turn_in_line * 8 // (sessions - 8) > (turn_in_line - 1) * 8 // (sessions - 8) OR sessions <= 16
)
SELECT
  lane,
  any_value(lanes.session) AS session,
  any_value(worst) AS worst,
  any_value(sessions) AS sessions,
  any_value(session_loss)::BIGINT AS session_loss,
  min(sent) AS start,
  max(coalesce(closed, sent)) AS stop,
  count(*) AS requests,
  max(ttft) AS ttft_max,
  sum(prompt_tokens)::BIGINT AS prompt,
  sum(gpu_tokens)::BIGINT AS gpu,
  sum(cpu_tokens)::BIGINT AS cpu,
  sum(disk_tokens)::BIGINT AS disk,
  sum(remote_tokens)::BIGINT AS remote,
  sum(external_tokens)::BIGINT AS external,
  sum(unnamed_tokens)::BIGINT AS unnamed,
  sum(lost_evicted)::BIGINT AS evicted,
  sum(loss_total - coalesce(lost_evicted, 0))::BIGINT AS lost,
  sum(prompt_tokens - served_tokens - loss_total)::BIGINT AS new
FROM lanes
JOIN v_requests USING (session), span
WHERE run_id = $run AND status = 'ok' AND sent IS NOT NULL
GROUP BY lane, least(179, floor(sent / seconds))
ORDER BY lane, start
