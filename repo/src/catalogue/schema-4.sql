-- Version 4: requests that may come twice, what is started with the host, and why a repository is not attached.

-- What was answered to requests that had an idempotency key: what comes with the key again is answered so, and not done.
CREATE TABLE request (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    asker TEXT NOT NULL,               -- whose key it is: two askers may choose the same
    key TEXT NOT NULL,
    hash BLOB NOT NULL,                -- SHA-256 of what was asked
    task TEXT,                         -- the task that was begun; or
    status INTEGER,                    -- the answer itself
    body TEXT,
    created TEXT NOT NULL,
    UNIQUE (asker, key)
) STRICT;
CREATE INDEX request_by_created ON request (created);

ALTER TABLE vm ADD COLUMN autostart TEXT;      -- JSON, api::Autostart; none if it is not started by itself
ALTER TABLE vbd ADD COLUMN autostart TEXT;     -- the same
-- Unplugged by the shutdown of the host, and by nobody who wanted it so.
ALTER TABLE vbd ADD COLUMN drained INTEGER NOT NULL DEFAULT FALSE;
-- What is still to be started since the host was.
CREATE TABLE to_start (
    object TEXT PRIMARY KEY,
    kind TEXT NOT NULL
) STRICT;

ALTER TABLE sr ADD COLUMN problem TEXT;        -- JSON, api::Problem: why it is lost
