-- Version 9: schedules of snapshots.

ALTER TABLE vdi ADD COLUMN retention TEXT;                             -- JSON, api::Retention
ALTER TABLE vdi ADD COLUMN scheduled INTEGER NOT NULL DEFAULT FALSE;   -- a snapshot taken by such a schedule
ALTER TABLE vdi ADD COLUMN retention_rests TEXT;                       -- until then the schedule destroys nothing
CREATE INDEX vdi_by_retention ON vdi (uuid) WHERE retention IS NOT NULL;
