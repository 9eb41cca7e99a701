-- Version 24: backup targets in buckets; schedules of backups.

ALTER TABLE backup_target ADD COLUMN s3 TEXT;  -- JSON, api::S3Access: paths of files, no secrets; NULL for a directory

ALTER TABLE vdi ADD COLUMN backup_schedule TEXT;   -- JSON, api::BackupSchedule
ALTER TABLE vdi ADD COLUMN last_backup TEXT;       -- when the last one that was made by it was due
ALTER TABLE vdi ADD COLUMN backup_problem TEXT;    -- JSON, api::Problem
CREATE INDEX vdi_by_backup_schedule ON vdi (uuid) WHERE backup_schedule IS NOT NULL;

ALTER TABLE vm ADD COLUMN backup_schedule TEXT;
ALTER TABLE vm ADD COLUMN last_backup TEXT;
ALTER TABLE vm ADD COLUMN backup_problem TEXT;
CREATE INDEX vm_by_backup_schedule ON vm (uuid) WHERE backup_schedule IS NOT NULL;
