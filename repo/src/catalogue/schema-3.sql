-- Version 3: repositories describe themselves (decision 0021).

-- Taken in by a scan without a VDI, because its maker has hidden it: it is not merged or removed by itself.
ALTER TABLE image ADD COLUMN kept INTEGER NOT NULL DEFAULT FALSE;

-- Of a repository that has an inventory: how many changes the catalogue has recorded, and the hash over all of them.
CREATE TABLE inventory (
    sr TEXT PRIMARY KEY REFERENCES sr (uuid),
    generation INTEGER NOT NULL,
    head TEXT NOT NULL
) STRICT;

-- Lines of inventories that may not be in their files yet. The file and these together are what the catalogue says.
CREATE TABLE inventory_outbox (
    sr TEXT NOT NULL REFERENCES sr (uuid),
    generation INTEGER NOT NULL,
    line TEXT NOT NULL,
    PRIMARY KEY (sr, generation)
) STRICT;
