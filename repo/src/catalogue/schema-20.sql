-- Version 20: the recording of the changed blocks of a VDI, and its maps of changed blocks.

ALTER TABLE vdi ADD COLUMN cbt TEXT;  -- JSON, api::ChangeTracking
