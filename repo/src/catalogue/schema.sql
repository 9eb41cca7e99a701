-- Version 1. Identities and times are text, so that the file can be read with any tool.

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
    created TEXT NOT NULL
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
    created TEXT NOT NULL
) STRICT;
CREATE INDEX vdi_by_snapshot_of ON vdi (snapshot_of);

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
    created TEXT NOT NULL
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
    UNIQUE (vm, position)
) STRICT;
CREATE INDEX vbd_by_vdi ON vbd (vdi);

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
    ended TEXT
) STRICT;
CREATE INDEX task_by_state ON task (state);
