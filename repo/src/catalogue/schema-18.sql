-- Version 18: how a VM that is stopping was asked to shut down, so that the next daemon continues in the same way.

ALTER TABLE vm ADD COLUMN shutdown TEXT;  -- JSON, api::VmShutdown
