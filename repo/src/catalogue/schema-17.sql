-- Version 17: why the schedule of a VDI has not taken a snapshot; and no seed without its VM.

ALTER TABLE vdi ADD COLUMN retention_problem TEXT;  -- JSON, api::Problem
DELETE FROM seed WHERE vm NOT IN (SELECT uuid FROM vm);
