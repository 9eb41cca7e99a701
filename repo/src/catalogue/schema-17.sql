-- Version 17: why the schedule of a VDI has not taken a snapshot; the sectors of VDIs; and no seed without its VM.

ALTER TABLE vdi ADD COLUMN retention_problem TEXT;  -- JSON, api::Problem
ALTER TABLE vdi ADD COLUMN logical_block_size INTEGER;  -- bytes; NULL: the storage decides, as before
DELETE FROM seed WHERE vm NOT IN (SELECT uuid FROM vm);
