//! Writes metadata in the order required by a format: with a sync before and after every batch, so that no batch
//! reaches the storage before the earlier ones.

use std::io;

use disk::{Format, Image, MetaWrite};
use uring::ImageFile;

/// Makes `batches` durable in order. If killed, a number of the first batches are durable, and any part of the next.
pub fn write(file: &mut ImageFile, batches: &[Vec<MetaWrite>]) -> io::Result<()> {
    write_synced(file, batches, ImageFile::sync)
}

/// Like [`write`], with `sync` as the sync operation.
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

/// Flushes metadata that has changed in an image without requests in flight, as a disk would.
pub fn flush(file: &mut ImageFile, image: &mut Image) -> io::Result<()> {
    let written = write(file, &image.seal());
    image.settled(written.is_ok());
    written
}
