-- The results file: one DuckDB file, any number of runs. `replay/results/database.py` applies this file to a
-- new results file, and to an older one after adding the columns that it lacks; so every statement may run twice.
--
-- Times are seconds from the run's start on one monotonic clock; `started_at` anchors it in UTC.
-- NULL always means unknown or not applicable, never 0. What SQL can derive is in the views, not in the tables.

CREATE TABLE IF NOT EXISTS schema_version (
  version INTEGER NOT NULL
);

-- A row a run.
CREATE TABLE IF NOT EXISTS runs (
  id            VARCHAR PRIMARY KEY,  -- UTC time of creation and a random tail: sorts by time, never repeats
  name          VARCHAR,              -- given with --name, else the backend's
  backend       VARCHAR NOT NULL,     -- preset
  target        VARCHAR NOT NULL,     -- sim, launch or a URL
  simulated     BOOLEAN NOT NULL,     -- true: no engine ran, every time and tier comes from the engine model
  model         VARCHAR,
  gpu           VARCHAR,
  trace         VARCHAR,              -- name in the trace's header
  trace_sha256  VARCHAR,              -- of the trace file, uncompressed
  synthetic     BOOLEAN,              -- the trace was drawn from distributions
  sessions      BIGINT,               -- conversations and sub-agents, clones included
  families      BIGINT,               -- sessions with their sub-agents: what --sessions and --concurrency count
  turns         BIGINT,               -- scheduled
  seed          BIGINT,
  speed         DOUBLE,               -- times are divided by it
  scale_tokens  DOUBLE,               -- token counts are multiplied by it
  skip_idle     BOOLEAN,              -- idle time of the whole system was jumped over
  concurrency   BIGINT,               -- families kept live; NULL: open loop, they start at the trace's times
  outputs       VARCHAR,              -- live or recorded: what stands for the model's output in the next prompt
  duplication   DOUBLE,               -- families replayed per family of the trace
  started_at    TIMESTAMP NOT NULL,   -- UTC
  duration_s    DOUBLE,
  status        VARCHAR NOT NULL CHECK (status IN ('running', 'complete', 'partial')),
  verdict       VARCHAR CHECK (verdict IN ('valid', 'partial', 'invalid')),
  reasons       VARCHAR[],            -- why the verdict is what it is, warnings included
  settings      JSON,                 -- preset, versions, profile, capacity_tokens per tier, kv_bytes_per_token
  self_check    JSON                  -- what the client noticed about itself (see reports/README.md)
);

-- A row a turn: what was asked, when each thing happened, which tier served the prompt, what was lost.
CREATE TABLE IF NOT EXISTS requests (
  run_id             VARCHAR NOT NULL,
  session            VARCHAR NOT NULL,  -- session of the trace; '#n' marks the n-th clone
  turn               BIGINT NOT NULL,   -- number in the trace
  position           BIGINT,            -- number of the turn within its session, from 0
  cause              VARCHAR,           -- start, tool, human, subagent, compaction, ...
  pause              DOUBLE,            -- from the end of what it waited for until it was due
  due                DOUBLE,
  sent               DOUBLE,
  first_byte         DOUBLE,
  first_token        DOUBLE,            -- first non-empty content, reasoning or tool-call delta
  last_token         DOUBLE,
  closed             DOUBLE,
  status             VARCHAR NOT NULL CHECK (status IN ('ok', 'error', 'dropped', 'cancelled')),
  error              VARCHAR,           -- one line
  planned_tokens     BIGINT,            -- prompt tokens that the schedule intended
  prompt_tokens      BIGINT,            -- as the server counted
  output_tokens      BIGINT,            -- as the server counted
  ideal_tokens       BIGINT,            -- an unbounded cache that computes at once would have served these
  gpu_tokens         BIGINT,
  cpu_tokens         BIGINT,
  disk_tokens        BIGINT,
  remote_tokens      BIGINT,
  external_tokens    BIGINT,            -- from beyond the GPU, tier not named by the engine
  computed_tokens    BIGINT,            -- prefill
  lost_evicted       BIGINT,
  lost_granularity   BIGINT,            -- rounding to blocks and chunks, and the last token, which always runs
  lost_never_stored  BIGINT,            -- the store was dropped, not finished in time, or made on another instance
  lost_cold          BIGINT,            -- restart or reset
  lost_diverged      BIGINT,            -- the server's tokens differ from the trace's
  lost_unknown       BIGINT,
  served_from        VARCHAR            -- slowest tier that served any prompt token
    CHECK (served_from IN ('gpu', 'cpu', 'disk', 'remote', 'external', 'none')),
  tier_source        VARCHAR,           -- who said so: simulated, usage, connector, events, counters
  recompute_s        DOUBLE,            -- prefill time that the loss cost
  load_s             DOUBLE,            -- time spent on loads from lower tiers
  preemptions        BIGINT,
  attempts           BIGINT,            -- times put on the wire
  worker             BIGINT,            -- process of the client that sent it, from 0
  instance           BIGINT             -- engine that answered, from 0; NULL: the client had no choice
);

-- What an engine's metrics endpoint said: long, because metrics come and go between versions and scrapes.
CREATE TABLE IF NOT EXISTS scrapes (
  run_id  VARCHAR NOT NULL,
  "at"    DOUBLE NOT NULL,              -- a reserved word in DuckDB: quote it
  name    VARCHAR NOT NULL,
  labels  VARCHAR,                      -- as scraped, e.g. {engine="0"}
  value   DOUBLE
);

-- What happened in a cache: stores, evictions, loads, resets.
CREATE TABLE IF NOT EXISTS cache_events (
  run_id   VARCHAR NOT NULL,
  "at"     DOUBLE NOT NULL,
  kind     VARCHAR NOT NULL,            -- store, evict, load, drop, reset, ...
  tier     VARCHAR,
  session  VARCHAR,                     -- of the request that caused it, where known
  turn     BIGINT,
  blocks   BIGINT,
  tokens   BIGINT,
  detail   VARCHAR
);

-- Requests with what follows from them. Times in seconds, NULL where a part is unknown.
CREATE OR REPLACE VIEW v_requests AS
SELECT
  *,
  first_token - sent AS ttft,
  first_token - due AS ttft_due,        -- includes the client's own delay: free of coordinated omission
  last_token - sent AS e2e,
  CASE WHEN output_tokens > 1 THEN (last_token - first_token) / (output_tokens - 1) END AS itl,
  sent - due AS drift,
  CASE
    WHEN computed_tokens IS NOT NULL THEN prompt_tokens - computed_tokens
    WHEN coalesce(gpu_tokens, cpu_tokens, disk_tokens, remote_tokens, external_tokens) IS NOT NULL
      THEN coalesce(gpu_tokens, 0) + coalesce(cpu_tokens, 0) + coalesce(disk_tokens, 0)
         + coalesce(remote_tokens, 0) + coalesce(external_tokens, 0)
  END AS served_tokens,
  CASE
    WHEN coalesce(gpu_tokens, cpu_tokens, disk_tokens, remote_tokens, external_tokens) IS NULL
      THEN prompt_tokens - computed_tokens
  END AS unnamed_tokens,                -- cached, but the backend does not say in which tier
  -- (not greatest(), which takes no notice of NULL)
  CASE WHEN ideal_tokens > served_tokens THEN ideal_tokens - served_tokens WHEN ideal_tokens <= served_tokens THEN 0 END
    AS loss_total
FROM requests;

-- Runs, newest first, with the number of requests by status.
CREATE OR REPLACE VIEW v_runs AS
SELECT runs.*, counts.* EXCLUDE (run_id)
FROM runs
LEFT JOIN (
  SELECT
    run_id,
    count(*) AS requests,
    count(*) FILTER (status = 'ok') AS ok,
    count(*) FILTER (status = 'error') AS errors,
    count(*) FILTER (status = 'dropped') AS dropped,
    count(*) FILTER (status = 'cancelled') AS cancelled
  FROM requests
  GROUP BY run_id
) AS counts ON counts.run_id = runs.id
ORDER BY started_at DESC, id DESC;

-- Where each prompt's tokens came from, a row for each tier that the backend names: 'computed' is prefill, 'unnamed'
-- was cached in a tier that the backend does not name. A tier about which nothing is known has no row.
CREATE OR REPLACE VIEW v_tiers AS
SELECT run_id, session, turn, tier, tokens
FROM (
  SELECT
    run_id, session, turn,
    unnest(['gpu', 'cpu', 'disk', 'remote', 'external', 'unnamed', 'computed']) AS tier,
    unnest([gpu_tokens, cpu_tokens, disk_tokens, remote_tokens, external_tokens, unnamed_tokens, computed_tokens])
      AS tokens
  FROM v_requests
)
WHERE tokens IS NOT NULL;

-- What each request lost and why, a row for each cause that the backend names; `seconds` is the prefill time that it
-- cost, in proportion to the tokens of the request's causes.
CREATE OR REPLACE VIEW v_losses AS
SELECT run_id, session, turn, cause, tokens, recompute_s * tokens / nullif(loss_total, 0) AS seconds
FROM (
  SELECT
    run_id, session, turn, recompute_s, loss_total,
    unnest(['evicted', 'granularity', 'never_stored', 'cold', 'diverged', 'unknown']) AS cause,
    unnest([lost_evicted, lost_granularity, lost_never_stored, lost_cold, lost_diverged, lost_unknown]) AS tokens
  FROM v_requests
)
WHERE tokens IS NOT NULL;

-- TTFT in seconds by the slowest tier read, of the answered requests of each run; 'all' is every one of them. A
-- percentile that n cannot support is NULL: p90 below 10 requests, p95 below 20, p99 below 100.
CREATE OR REPLACE VIEW v_ttft AS
SELECT
  run_id, served_from, n, mean, p[1] AS p50,
  CASE WHEN n >= 10 THEN p[2] END AS p90,
  CASE WHEN n >= 20 THEN p[3] END AS p95,
  CASE WHEN n >= 100 THEN p[4] END AS p99
FROM (
  SELECT
    run_id,
    CASE WHEN grouping(served_from) = 1 THEN 'all' ELSE coalesce(served_from, 'unknown') END AS served_from,
    count(ttft) AS n,
    avg(ttft) AS mean,
    quantile_cont(ttft, [0.5, 0.9, 0.95, 0.99]) AS p
  FROM v_requests
  WHERE status = 'ok'
  GROUP BY GROUPING SETS ((run_id, served_from), (run_id))
)
WHERE n > 0;

-- Sessions: how many of their turns were answered, what these asked, reused and lost, and when the last one ended.
CREATE OR REPLACE VIEW v_sessions AS
SELECT
  run_id,
  session,
  count(*) AS turns,
  count(*) FILTER (status = 'ok') AS ok,
  sum(prompt_tokens) FILTER (status = 'ok')::BIGINT AS prompt_tokens,
  sum(output_tokens) FILTER (status = 'ok')::BIGINT AS output_tokens,
  sum(ideal_tokens) FILTER (status = 'ok')::BIGINT AS ideal_tokens,
  sum(served_tokens) FILTER (status = 'ok')::BIGINT AS served_tokens,
  sum(loss_total) FILTER (status = 'ok')::BIGINT AS loss_total,
  sum(lost_evicted) FILTER (status = 'ok')::BIGINT AS lost_evicted,
  sum(recompute_s) FILTER (status = 'ok') AS recompute_s,
  median(ttft) FILTER (status = 'ok') AS ttft_p50,
  max(ttft) FILTER (status = 'ok') AS ttft_max,
  min(sent) AS first_sent,
  max(closed) AS last_closed
FROM v_requests
GROUP BY run_id, session;
