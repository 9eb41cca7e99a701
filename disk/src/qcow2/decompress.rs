//! Compressed clusters: the bytes that one holds, out of the bytes of the file.
//!
//! Knows nothing of where clusters live. What comes in is hostile: whatever it says, no more than one cluster is ever
//! written, and time and memory are bounded by what comes in and one cluster.
//!
//! The length of a compressed cluster is known in sectors only, so that behind its end comes something else, which is
//! ignored. A cluster that unpacks to less or more than its size is damaged.

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
use miniz_oxide::inflate::core::{self as inflate, DecompressorOxide};
use zstd_safe::{DCtx, find_frame_compressed_size};

/// How the compressed clusters of an image are compressed (header, byte 104).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Raw deflate, without the header and the checksum of zlib; the only way of an image without the field.
    #[default]
    Deflate,
    /// One or more Zstandard frames.
    Zstd,
}

/// A compressed cluster does not decompress to a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Garbled(&'static str);

/// The cluster that `bytes` begin with, when unpacked.
pub fn decompress(compression: Compression, cluster_size: usize, bytes: &[u8]) -> Result<Vec<u8>, Garbled> {
    let mut cluster = vec![0; cluster_size];
    match compression {
        Compression::Deflate => inflate(bytes, &mut cluster)?,
        Compression::Zstd => unframe(bytes, &mut cluster)?,
    }
    Ok(cluster)
}

fn inflate(bytes: &[u8], cluster: &mut [u8]) -> Result<(), Garbled> {
    let mut state = Box::<DecompressorOxide>::default();
    let flags = TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF;
    let (status, _, written) = inflate::decompress(&mut state, bytes, cluster, 0, flags);
    match status {
        _ if written < cluster.len() => Err(Garbled("the deflated bytes do not make a cluster")),
        // Full, and the end mark not read: no more is required.
        TINFLStatus::Done | TINFLStatus::HasMoreOutput => Ok(()),
        _ => Err(Garbled("the deflated bytes are no deflate stream")),
    }
}

/// Frame by frame, each straight into its place: so the window, which a frame may claim to be huge, takes no memory of
/// its own.
fn unframe(mut bytes: &[u8], cluster: &mut [u8]) -> Result<(), Garbled> {
    let mut context = DCtx::try_create().ok_or(Garbled("there is no memory to decompress it"))?;
    let mut place = cluster;
    while !place.is_empty() {
        let (frame, rest) = find_frame_compressed_size(bytes)
            .ok()
            .and_then(|len| bytes.split_at_checked(len))
            .filter(|(frame, _)| !frame.is_empty())
            .ok_or(Garbled("the Zstandard frames do not make a cluster"))?;
        let written = context.decompress(place, frame).map_err(|_| Garbled("a Zstandard frame is damaged"))?;
        place = place.get_mut(written..).unwrap_or_default();
        bytes = rest;
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use super::*;

    const CLUSTER: usize = 64 << 10;

    fn text() -> Vec<u8> {
        (0..CLUSTER).map(|at| u8::try_from(at / 7 % 251).unwrap()).collect()
    }

    fn deflated(bytes: &[u8]) -> Vec<u8> {
        miniz_oxide::deflate::compress_to_vec(bytes, 6)
    }

    fn framed(bytes: &[u8]) -> Vec<u8> {
        let mut compressed = vec![0; zstd_safe::compress_bound(bytes.len())];
        let len = zstd_safe::compress(&mut compressed[..], bytes, 3).unwrap();
        compressed.truncate(len);
        compressed
    }

    #[test]
    fn a_cluster_unpacks_whatever_follows_it_in_its_last_sector() {
        for (compression, compressed) in
            [(Compression::Deflate, deflated(&text())), (Compression::Zstd, framed(&text()))]
        {
            for follows in [0, 0xff, 0x28] {
                let mut bytes = compressed.clone();
                bytes.resize(compressed.len() + 300, follows);
                assert_eq!(decompress(compression, CLUSTER, &bytes).unwrap(), text());
            }
            assert_eq!(decompress(compression, CLUSTER, &compressed).unwrap(), text());
        }
    }

    #[test]
    fn a_cluster_of_several_frames_unpacks() {
        let text = text();
        let (first, second) = text.split_at(1000);
        let bytes = [framed(first), framed(second)].concat();
        assert_eq!(decompress(Compression::Zstd, CLUSTER, &bytes).unwrap(), text);
    }

    #[test]
    fn less_than_a_cluster_is_refused() {
        let short = &text()[..CLUSTER - 1];
        assert!(decompress(Compression::Deflate, CLUSTER, &deflated(short)).is_err());
        assert!(decompress(Compression::Zstd, CLUSTER, &framed(short)).is_err());
        assert!(decompress(Compression::Deflate, CLUSTER, &[]).is_err());
        assert!(decompress(Compression::Zstd, CLUSTER, &[]).is_err());
    }

    #[test]
    fn a_bomb_ends_with_the_cluster() {
        let zeroes = vec![0; 64 << 20];
        assert_eq!(decompress(Compression::Deflate, CLUSTER, &deflated(&zeroes)).unwrap(), vec![0; CLUSTER]);
        assert!(decompress(Compression::Zstd, CLUSTER, &framed(&zeroes)).is_err());
    }

    /// Scope: every single byte of two compressed clusters replaced by each of three values.
    #[test]
    fn damage_is_refused_or_unpacks_to_exactly_one_cluster() {
        for (compression, compressed) in
            [(Compression::Deflate, deflated(&text())), (Compression::Zstd, framed(&text()))]
        {
            for at in 0..compressed.len() {
                for value in [0, 0x55, 0xff] {
                    let mut bytes = compressed.clone();
                    bytes[at] = value;
                    if let Ok(cluster) = decompress(compression, CLUSTER, &bytes) {
                        assert_eq!(cluster.len(), CLUSTER);
                    }
                }
            }
        }
    }
}
