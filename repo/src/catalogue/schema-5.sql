-- Version 5: a machine whose guest is held in memory is paused; suspended is the word for one on disk.

UPDATE vm SET power = 'paused' WHERE power = 'suspended';
