-- Version 23: backup targets in buckets.

ALTER TABLE backup_target ADD COLUMN s3 TEXT;  -- JSON, api::S3Access: paths of files, no secrets; NULL for a directory
