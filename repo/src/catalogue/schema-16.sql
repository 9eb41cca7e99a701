-- Version 16: sizes of transfers that suit the storage of a repository.

ALTER TABLE sr ADD COLUMN split TEXT NOT NULL DEFAULT 'auto';  -- api::SizeRule
ALTER TABLE sr ADD COLUMN merge TEXT NOT NULL DEFAULT 'auto';
ALTER TABLE sr ADD COLUMN policy TEXT;                         -- JSON, api::SrPolicy; none before a calibration
ALTER TABLE sr ADD COLUMN policy_points TEXT;                  -- JSON, what was measured for it: api::SrMeasured
