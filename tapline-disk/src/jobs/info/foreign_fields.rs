//! The metadata of a VMDK or a VHDX, as printed by `image info`.

use control::size::readable;
use disk::Image;
use disk::foreign::Body;
use serde::Serialize;

/// The fields of a VMDK. Names and meanings are part of the interface.
#[derive(Serialize)]
pub struct VmdkFields {
    /// The type according to its descriptor.
    kind: &'static str,
    grain_size: u64,
}

/// The fields of a VHDX. Names and meanings are part of the interface.
#[derive(Serialize)]
pub struct VhdxFields {
    /// `fixed` or `dynamic`.
    kind: &'static str,
    block_size: u64,
    /// The size of the guest's sectors in bytes.
    logical_sector_size: u64,
}

/// Returns the fields of a VMDK, or `None` for other formats.
pub fn vmdk(image: &Image) -> Option<VmdkFields> {
    let Image::Foreign(image) = image else { return None };
    let Body::Vmdk(vmdk) = image.body() else { return None };
    Some(VmdkFields { kind: vmdk.kind().word(), grain_size: vmdk.grain() })
}

/// Returns the fields of a VHDX, or `None` for other formats.
pub fn vhdx(image: &Image) -> Option<VhdxFields> {
    let Image::Foreign(image) = image else { return None };
    let Body::Vhdx(vhdx) = image.body() else { return None };
    let kind = if vhdx.is_fixed() { "fixed" } else { "dynamic" };
    Some(VhdxFields { kind, block_size: vhdx.block(), logical_sector_size: vhdx.logical_sector() })
}

/// Formats the fields for people, one row each.
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
