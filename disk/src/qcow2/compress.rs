//! Compressing a cluster: the other side of [`super::decompress`].
//!
//! The whole cluster is one deflate stream or one Zstandard frame. Distances in the stream reach as far as 32 KiB; a
//! reader inflates into a cluster of its own, as QEMU and we do, and has all of them there.

use miniz_oxide::deflate::compress_to_vec;
use zstd_safe::{CCtx, compress_bound};

use super::decompress::Compression;
use super::layout::SECTOR;
use crate::size::in_memory;

/// The default of other programs: a higher level takes several times as long for a few percent.
const DEFLATE_LEVEL: u8 = 6;
const ZSTD_LEVEL: i32 = 3;

/// The bytes of a cluster compressed; `None` if that saves no sector.
pub fn compress(compression: Compression, cluster: &[u8]) -> Option<Vec<u8>> {
    let compressed = match compression {
        Compression::Deflate => compress_to_vec(cluster, DEFLATE_LEVEL),
        Compression::Zstd => {
            let mut frame = vec![0; compress_bound(cluster.len())];
            // What cannot be compressed is stored as it is.
            let len = CCtx::try_create()?.compress(&mut frame[..], cluster, ZSTD_LEVEL).ok()?;
            frame.truncate(len);
            frame
        }
    };
    (compressed.len() + in_memory(SECTOR) <= cluster.len()).then_some(compressed)
}

#[cfg(test)]
mod test {
    use fastrand::Rng;

    use super::super::decompress::decompress;
    use super::*;

    const CLUSTER: usize = 64 << 10;

    /// Numbers without any order.
    fn noise(len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        Rng::with_seed(1).fill(&mut bytes);
        bytes
    }

    #[test]
    fn a_compressed_cluster_is_smaller_and_decompresses_to_itself() {
        // The second one repeats only what is 30 KiB in front.
        let clusters =
            [(0..CLUSTER).map(|at| u8::try_from(at / 7 % 251).unwrap()).collect(), noise(30 << 10).repeat(3)];
        for mut cluster in clusters {
            cluster.truncate(CLUSTER);
            for compression in [Compression::Deflate, Compression::Zstd] {
                let compressed = compress(compression, &cluster).unwrap();
                assert!(compressed.len() < CLUSTER - 512);
                assert_eq!(decompress(compression, CLUSTER, &compressed).unwrap(), cluster);
            }
        }
    }

    #[test]
    fn a_cluster_that_does_not_shrink_is_left_alone() {
        for compression in [Compression::Deflate, Compression::Zstd] {
            assert_eq!(compress(compression, &noise(CLUSTER)), None);
        }
    }
}
