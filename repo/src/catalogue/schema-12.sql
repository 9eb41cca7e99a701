-- Version 12: schedules of snapshots of VMs.

ALTER TABLE vm ADD COLUMN retention TEXT;                                     -- JSON, api::Retention
ALTER TABLE vm ADD COLUMN retention_problem TEXT;                             -- JSON, api::Problem
ALTER TABLE vm_snapshot ADD COLUMN scheduled INTEGER NOT NULL DEFAULT FALSE;  -- taken by such a schedule
CREATE INDEX vm_by_retention ON vm (uuid) WHERE retention IS NOT NULL;
