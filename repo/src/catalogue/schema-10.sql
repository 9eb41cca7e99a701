-- Version 10: who has asked, and roles of tokens.

ALTER TABLE task ADD COLUMN requester TEXT;    -- JSON, api::Requester; none for tasks of earlier versions
ALTER TABLE token ADD COLUMN role TEXT;        -- api::Role; of earlier versions' tokens by read_only
ALTER TABLE token ADD COLUMN tag TEXT;         -- of the objects that an operator may operate
