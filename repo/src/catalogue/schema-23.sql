-- Version 23: snapshots that exist for a backup only say so themselves, and in the inventory of their repository.

ALTER TABLE vdi ADD COLUMN for_backup INTEGER NOT NULL DEFAULT FALSE;
