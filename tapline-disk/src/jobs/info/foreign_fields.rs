//! What `image info` shows of a VMDK or a VHDX.

use control::size::readable;
use disk::Image;
use disk::foreign::Body;
use serde::Serialize;

/// Of a VMDK. Names and meanings are part of the interface.
#[derive(Serialize)]
pub struct VmdkFields {
    /// What its descriptor calls it.
    kind: &'static str,
    grain_size: u64,
}

/// Of a VHDX. Names and meanings are part of the interface.
#[derive(Serialize)]
pub struct VhdxFields {
    /// `fixed` or `dynamic`.
    kind: &'static str,
    block_size: u64,
    /// Bytes of a sector as its guest has them.
    logical_sector_size: u64,
}

/// The fields of a VMDK.
pub fn vmdk(image: &Image) -> Option<VmdkFields> {
    let Image::Foreign(image) = image else { return None };
    let Body::Vmdk(vmdk) = image.body() else { return None };
    Some(VmdkFields { kind: vmdk.kind().word(), grain_size: vmdk.grain() })
}

/// The fields of a VHDX.
pub fn vhdx(image: &Image) -> Option<VhdxFields> {
    let Image::Foreign(image) = image else { return None };
    let Body::Vhdx(vhdx) = image.body() else { return None };
    let kind = if vhdx.is_fixed() { "fixed" } else { "dynamic" };
    Some(VhdxFields { kind, block_size: vhdx.block(), logical_sector_size: vhdx.logical_sector() })
}

/// The same for people.
pub fn rows(vmdk: Option<&VmdkFields>, vhdx: Option<&VhdxFields>) -> Vec<(&'static str, String)> {
    let (kind, rest) = match (vmdk, vhdx) {
        (Some(vmdk), _) => (vmdk.kind, vec![("grains", readable(vmdk.grain_size))]),
        (_, Some(vhdx)) => {
            let sectors = format!("{} bytes", vhdx.logical_sector_size);
            (vhdx.kind, vec![("blocks", readable(vhdx.block_size)), ("sectors", sectors)])
        }
        (None, None) => return Vec::new(),
    };
    std::iter::once(("kind", kind.to_owned())).chain(rest).collect()
}
