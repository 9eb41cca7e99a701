-- Version 22: the VDIs in a VM's snapshot that the daemon takes for a backup: they may outlive the VM and its snapshot.

ALTER TABLE backup_snapshot ADD COLUMN disks TEXT NOT NULL DEFAULT '[]';  -- JSON, their UUIDs
