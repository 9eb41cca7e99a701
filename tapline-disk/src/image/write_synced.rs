//! Writes metadata in the order required by a format: with a sync before and after every batch, so that no batch
//! reaches the storage before the earlier ones.

use std::io;

use disk::{Format, Image, MetaWrite};
use uring::ImageFile;

/// Makes `batches` durable, one after the other. Killed on the way: some of the first are, and of the next any part.
pub fn write(file: &mut ImageFile, batches: &[Vec<MetaWrite>]) -> io::Result<()> {
    write_synced(file, batches, ImageFile::sync)
}

/// The same, with `sync` as the sync operation.
pub fn write_synced(
    file: &mut ImageFile,
    batches: &[Vec<MetaWrite>],
    mut sync: impl FnMut(&mut ImageFile) -> io::Result<()>,
) -> io::Result<()> {
    if batches.iter().all(Vec::is_empty) {
        return Ok(());
    }
    sync(file)?;
    for batch in batches {
        for write in batch {
            file.write_at(write.at, &write.bytes)?;
        }
        sync(file)?;
    }
    Ok(())
}

/// Makes durable what has changed in an image that has nothing in flight, as a round of a disk would.
pub fn round(file: &mut ImageFile, image: &mut Image) -> io::Result<()> {
    let written = write(file, &image.seal());
    image.settled(written.is_ok());
    written
}
