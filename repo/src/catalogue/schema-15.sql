-- Version 15: shares of storage.

ALTER TABLE vbd ADD COLUMN share_weight INTEGER NOT NULL DEFAULT 100;
ALTER TABLE sr ADD COLUMN share_depth INTEGER NOT NULL DEFAULT 128;  -- requests in flight of all its disks
