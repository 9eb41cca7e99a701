-- Version 18: the request by which a VM is stopping, so that the next daemon continues in the same way.

ALTER TABLE vm ADD COLUMN shutdown TEXT;  -- JSON, api::VmShutdown
