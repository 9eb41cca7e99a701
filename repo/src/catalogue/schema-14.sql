-- Version 14: limits of disks.

ALTER TABLE vbd ADD COLUMN limits TEXT;        -- JSON, api::DiskLimits; none for a disk without limits
