-- Version 21: backup targets, and the snapshots that the daemon takes to back them up and destroys afterwards.

CREATE TABLE backup_target (
    uuid TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    path TEXT NOT NULL,                -- a directory
    target_id TEXT NOT NULL,           -- what the target in it is recognized by
    key_file TEXT,                     -- the path of the file; the key itself is nowhere in here
    created TEXT NOT NULL
) STRICT;

-- Recorded before the snapshot is taken, so that none outlives a daemon that dies.
CREATE TABLE backup_snapshot (
    snapshot TEXT PRIMARY KEY,         -- a VDI, or the snapshot of a VM
    vm TEXT                            -- that VM
) STRICT;
