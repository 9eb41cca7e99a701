-- Version 17, the first that can be upgraded. Identities and times are text, so that the file can be read with any tool.

CREATE TABLE meta (
    key TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;

CREATE TABLE sr (
    uuid TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    description TEXT NOT NULL,
    source TEXT NOT NULL,              -- JSON, api::SrSource
    state TEXT NOT NULL,
    variant TEXT,                      -- JSON, api::Variant
    space TEXT,                        -- JSON, api::Space
    reserve INTEGER NOT NULL,
    created TEXT NOT NULL,
    problem TEXT,                      -- JSON, api::Problem: why it is lost
    tags TEXT NOT NULL DEFAULT '[]',            -- JSON, api::Tags
    other_config TEXT NOT NULL DEFAULT '{}',    -- JSON, api::OtherConfig
    share_depth INTEGER NOT NULL DEFAULT 128,   -- requests in flight of all its disks
    split TEXT NOT NULL DEFAULT 'auto',         -- api::SizeRule
    merge TEXT NOT NULL DEFAULT 'auto',
    policy TEXT,                       -- JSON, api::SrPolicy; none before a calibration
    policy_points TEXT                 -- JSON, what was measured for it: api::SrMeasured
) STRICT;

-- A file that holds a disk or a layer of one. What no VDI refers to is hidden: it is there for those that stand on it.
CREATE TABLE image (
    uuid TEXT PRIMARY KEY,
    sr TEXT NOT NULL REFERENCES sr (uuid),
    file TEXT NOT NULL,
    format TEXT NOT NULL,
    size INTEGER NOT NULL,
    physical INTEGER NOT NULL,
    parent TEXT REFERENCES image (uuid),
    state TEXT NOT NULL,
    -- Taken in by a scan without a VDI, because its maker has hidden it: it is not merged or removed by itself.
    kept INTEGER NOT NULL DEFAULT FALSE,
    UNIQUE (sr, file)
) STRICT;
CREATE INDEX image_by_parent ON image (parent);

CREATE TABLE vdi (
    uuid TEXT PRIMARY KEY,
    image TEXT NOT NULL UNIQUE REFERENCES image (uuid),
    name TEXT NOT NULL,
    description TEXT NOT NULL,
    read_only INTEGER NOT NULL,
    snapshot_of TEXT,                  -- stays when that VDI is gone
    snapshot_time TEXT,
    created TEXT NOT NULL,
    tags TEXT NOT NULL DEFAULT '[]',
    other_config TEXT NOT NULL DEFAULT '{}',
    retention TEXT,                    -- JSON, api::Retention
    scheduled INTEGER NOT NULL DEFAULT FALSE,   -- a snapshot taken by such a schedule
    retention_rests TEXT,              -- until then the schedule destroys nothing
    retention_problem TEXT,            -- JSON, api::Problem
    logical_block_size INTEGER         -- bytes; NULL: the storage decides
) STRICT;
CREATE INDEX vdi_by_snapshot_of ON vdi (snapshot_of);
-- Not a unique index: an object that is found in a repository keeps its name.
CREATE INDEX vdi_by_name ON vdi (name);
CREATE INDEX vdi_by_retention ON vdi (uuid) WHERE retention IS NOT NULL;

CREATE TABLE vm (
    uuid TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    description TEXT NOT NULL,
    driver TEXT NOT NULL,
    memory INTEGER NOT NULL,
    vcpus INTEGER NOT NULL,
    boot TEXT NOT NULL,                -- JSON, api::Boot
    platform TEXT NOT NULL,            -- JSON
    power TEXT NOT NULL,
    pid INTEGER,
    pid_started INTEGER,               -- clock ticks after boot (proc(5)): tells a process from a later one with its number
    pid_boot TEXT,                     -- which boot: /proc/sys/kernel/random/boot_id
    handle TEXT,
    problem TEXT,                      -- JSON, api::Problem
    created TEXT NOT NULL,
    autostart TEXT,                    -- JSON, api::Autostart; none if it is not started by itself
    tags TEXT NOT NULL DEFAULT '[]',
    other_config TEXT NOT NULL DEFAULT '{}',
    -- The guest is paused for this task and not by anybody who wanted it so: it is resumed, by the next daemon if need be.
    held_for TEXT,
    retention TEXT,                    -- JSON, api::Retention
    retention_problem TEXT             -- JSON, api::Problem
) STRICT;
CREATE INDEX vm_by_retention ON vm (uuid) WHERE retention IS NOT NULL;

-- Snapshots of all disks of a VM at one moment.
CREATE TABLE vm_snapshot (
    uuid TEXT PRIMARY KEY,
    vm TEXT NOT NULL REFERENCES vm (uuid),
    name TEXT NOT NULL,
    description TEXT NOT NULL,
    created TEXT NOT NULL,
    hardware TEXT NOT NULL,            -- JSON, api::VmHardware: what the VM had then
    disks TEXT NOT NULL,               -- JSON, api::VmSnapshotDisk of each disk; a VDI may be gone by now
    scheduled INTEGER NOT NULL DEFAULT FALSE    -- taken by the VM's schedule
) STRICT;
CREATE INDEX vm_snapshot_by_vm ON vm_snapshot (vm);

-- Cloud-init seeds of VMs. They hold secrets, so they are in no object and in no event.
CREATE TABLE seed (
    vm TEXT PRIMARY KEY REFERENCES vm (uuid),
    user_data TEXT NOT NULL,
    meta_data TEXT,
    network_config TEXT
) STRICT;

-- Memory of suspended VMs.
CREATE TABLE vm_memory (
    vm TEXT PRIMARY KEY REFERENCES vm (uuid),
    memory TEXT NOT NULL               -- JSON, VmMemory
) STRICT;

CREATE TABLE vbd (
    uuid TEXT PRIMARY KEY,
    vm TEXT REFERENCES vm (uuid),
    vdi TEXT NOT NULL REFERENCES vdi (uuid),
    position INTEGER NOT NULL CHECK (position BETWEEN 0 AND 254),
    mode TEXT NOT NULL,
    bootable INTEGER NOT NULL,
    transport TEXT NOT NULL,
    queues INTEGER NOT NULL,
    state TEXT NOT NULL,
    socket TEXT,
    pid INTEGER,
    pid_started INTEGER,
    restarts INTEGER NOT NULL,
    waits_for_space INTEGER NOT NULL,
    problem TEXT,                      -- JSON, api::Problem
    created TEXT NOT NULL,
    autostart TEXT,                    -- JSON, api::Autostart; none if it is not plugged by itself
    -- Unplugged by the shutdown of the host, and by nobody who wanted it so.
    drained INTEGER NOT NULL DEFAULT FALSE,
    tags TEXT NOT NULL DEFAULT '[]',
    other_config TEXT NOT NULL DEFAULT '{}',
    limits TEXT,                       -- JSON, api::DiskLimits; none for a disk without limits
    share_weight INTEGER NOT NULL DEFAULT 100,
    UNIQUE (vm, position)
) STRICT;
CREATE INDEX vbd_by_vdi ON vbd (vdi);

-- What is still to be started since the host was.
CREATE TABLE to_start (
    object TEXT PRIMARY KEY,
    kind TEXT NOT NULL
) STRICT;

-- Who may use a VDI now: one writer, or any number of readers. A holder is a VBD or a task.
CREATE TABLE lease (
    vdi TEXT NOT NULL REFERENCES vdi (uuid),
    holder TEXT NOT NULL,
    mode TEXT NOT NULL CHECK (mode IN ('RW', 'RO')),
    PRIMARY KEY (vdi, holder)
) STRICT;
CREATE INDEX lease_by_holder ON lease (holder);
CREATE TRIGGER lease_excludes BEFORE INSERT ON lease
WHEN EXISTS (SELECT 1 FROM lease WHERE vdi = NEW.vdi AND holder <> NEW.holder AND (mode = 'RW' OR NEW.mode = 'RW'))
BEGIN
    SELECT RAISE(ABORT, 'the VDI is leased');
END;

-- What a task has to itself while it is at work: VDIs and images, by identity. A lease says who may read and write a VDI's
-- data; a claim, who may change what it consists of, which is possible under a guest that goes on.
CREATE TABLE claim (
    object TEXT PRIMARY KEY,
    task TEXT NOT NULL
) STRICT;
CREATE INDEX claim_by_task ON claim (task);

-- The names of what tasks are creating. Of a VDI with its repository, otherwise without one.
CREATE TABLE name_claim (
    task TEXT PRIMARY KEY,
    kind TEXT NOT NULL,
    sr TEXT,
    name TEXT NOT NULL
) STRICT;

-- Which repositories a job needs until it is over.
CREATE TABLE sr_use (
    sr TEXT NOT NULL,
    task TEXT NOT NULL,
    PRIMARY KEY (sr, task)
) STRICT;
CREATE INDEX sr_use_by_task ON sr_use (task);

-- Tasks, and the journal of those whose effect must be all or nothing.
CREATE TABLE task (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    uuid TEXT NOT NULL UNIQUE,
    verb TEXT NOT NULL,
    about TEXT NOT NULL,               -- JSON, [api::About]
    state TEXT NOT NULL,
    step TEXT,
    cancellable INTEGER NOT NULL,
    intent TEXT,                       -- JSON, all that is needed to do or undo it; none for one that leaves nothing behind
    result TEXT,                       -- JSON
    problem TEXT,                      -- JSON, api::Problem
    created TEXT NOT NULL,
    ended TEXT,
    requester TEXT                     -- JSON, api::Requester
) STRICT;
CREATE INDEX task_by_state ON task (state);

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

-- Of a repository that has an inventory: how many changes the catalogue has recorded, and the hash over all of them.
CREATE TABLE inventory (
    sr TEXT PRIMARY KEY REFERENCES sr (uuid),
    generation INTEGER NOT NULL,
    head TEXT NOT NULL
) STRICT;

-- Lines of inventories that may not be in their files yet. The file and these together are what the catalogue says.
CREATE TABLE inventory_outbox (
    sr TEXT NOT NULL REFERENCES sr (uuid),
    generation INTEGER NOT NULL,
    line TEXT NOT NULL,
    PRIMARY KEY (sr, generation)
) STRICT;

-- Tokens, for the API over TCP.
CREATE TABLE token (
    uuid TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    hash BLOB NOT NULL UNIQUE,         -- SHA-256 of the secret
    read_only INTEGER NOT NULL,
    created TEXT NOT NULL,
    expires TEXT,
    role TEXT,                         -- api::Role
    tag TEXT                           -- of the objects that an operator may operate
) STRICT;
