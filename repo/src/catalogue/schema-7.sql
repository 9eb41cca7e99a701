-- Version 7: tags, strings that programs keep with objects, and snapshots of all disks of a VM at one moment.

ALTER TABLE sr ADD COLUMN tags TEXT NOT NULL DEFAULT '[]';             -- JSON, api::Tags
ALTER TABLE sr ADD COLUMN other_config TEXT NOT NULL DEFAULT '{}';     -- JSON, api::OtherConfig
ALTER TABLE vdi ADD COLUMN tags TEXT NOT NULL DEFAULT '[]';
ALTER TABLE vdi ADD COLUMN other_config TEXT NOT NULL DEFAULT '{}';
ALTER TABLE vbd ADD COLUMN tags TEXT NOT NULL DEFAULT '[]';
ALTER TABLE vbd ADD COLUMN other_config TEXT NOT NULL DEFAULT '{}';
ALTER TABLE vm ADD COLUMN tags TEXT NOT NULL DEFAULT '[]';
ALTER TABLE vm ADD COLUMN other_config TEXT NOT NULL DEFAULT '{}';

-- The guest is paused for this task and not by anybody who wanted it so: it is resumed, by the next daemon if need be.
ALTER TABLE vm ADD COLUMN held_for TEXT;

CREATE TABLE vm_snapshot (
    uuid TEXT PRIMARY KEY,
    vm TEXT NOT NULL REFERENCES vm (uuid),
    name TEXT NOT NULL,
    description TEXT NOT NULL,
    created TEXT NOT NULL,
    hardware TEXT NOT NULL,            -- JSON, api::VmHardware: what the VM had then
    disks TEXT NOT NULL                -- JSON, api::VmSnapshotDisk of each disk; a VDI may be gone by now
) STRICT;
CREATE INDEX vm_snapshot_by_vm ON vm_snapshot (vm);
