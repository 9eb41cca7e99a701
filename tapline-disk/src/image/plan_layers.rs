//! The layers of a chain for the plans of a merge or a resize, and why a plan is refused.
//!
//! It knows nothing about the execution of a plan, by a job or under a guest. Invariant: both are refused for the same
//! reasons.

use control::{ImageName, Kind};
use disk::{Format, Image};
use plan::{Exposing, Layer, Plan};

use crate::process::failure::Failure;

/// The layers of a chain, leaf first.
pub type Named<'a> = [(ImageName, &'a Image)];

/// Plans a merge of layers of a chain. Refused if growing a layer would expose data of the one below it, or if a source
/// has internal snapshots: they would show the changed contents of the layers below it, and be removed with its file.
pub fn merge(chain: &Named<'_>, from: usize, into: usize, delete: bool) -> Result<Plan, Failure> {
    for ((upper, above), (lower, _)) in chain.iter().zip(chain.iter().skip(1)).take(into).skip(from) {
        if matches!(above, Image::Qcow2(qcow2) if qcow2.info().snapshots > 0) {
            let why = "it has internal snapshots, whose contents would change";
            return Err(Failure::new(format!("merge {upper} into {lower}"), why)
                .advise("delete them, or copy the disk: tapline image convert")
                .of_kind(Kind::Unsupported));
        }
    }
    let plan = plan::merge(&plan::Merge { from, into, layers: &layers(chain), delete });
    plan.map_err(|exposing| {
        let name = |depth: usize| chain.get(depth).map(|(name, _)| name.to_string()).unwrap_or_default();
        refusal(format!("merge {} into {}", name(from), name(into)), chain, exposing)
    })
}

/// Plans the growth of a disk. Refused if that would expose data of its parent.
pub fn resize(chain: &Named<'_>, len: u64) -> Result<Plan, Failure> {
    plan::resize(len, &layers(chain)).map_err(|exposing| {
        let name = chain.first().map(|(name, _)| name.to_string()).unwrap_or_default();
        refusal(format!("resize {name} from {} to {len} bytes", exposing.len), chain, exposing)
    })
}

fn layers(chain: &Named<'_>) -> Vec<Layer> {
    chain.iter().map(|(name, image)| layer(name, image)).collect()
}

fn layer(name: &ImageName, image: &Image) -> Layer {
    let raw = matches!(image, Image::Raw(_));
    Layer { len: image.geometry().len, flat: raw || name.data_file.is_some(), raw }
}

/// Explains that growing the upper of two layers would expose data that it hides. Without parents it hides nothing.
fn refusal(tried: String, chain: &Named<'_>, Exposing { depth, len, below }: Exposing) -> Failure {
    let mut names = chain.iter().skip(depth).map(|(name, _)| name);
    let (Some(upper), parents) = (names.next(), names.collect::<Vec<_>>()) else {
        unreachable!("a layer that exposes another is one of the chain")
    };
    let lower = parents.first().map(ToString::to_string).unwrap_or_default();
    let parents: String = parents.iter().map(|parent| format!(" --parent {parent}")).collect();
    let why = format!(
        "{lower} has {below} bytes, of which {upper} above it hides all beyond {len}: they would appear in the disk"
    );
    Failure::new(tried, why)
        .advise(format!(
            "while nothing uses the image, copy into it what it shows of its parents: tapline image flatten \
             {upper}{parents}\n  or copy the disk: tapline image convert"
        ))
        .of_kind(Kind::Unsupported)
}
