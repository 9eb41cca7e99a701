//! The fit against the models of storage: what it finds with few points is what all of them show.

use std::convert::Infallible;

use fastrand::Rng;

use super::*;
use crate::load::throughput;
use crate::preset::Preset;

/// Requests of 4 KiB to 1 MiB, 1 to 32 in flight, in order and anywhere.
fn workloads() -> Vec<Load> {
    let sizes = (0..9).map(|power| (4 * KIB) << power);
    let depths = (0..6).map(|power| 1 << power);
    let of = |size| {
        depths.clone().flat_map(move |depth| {
            [Pattern::Random, Pattern::Sequential].map(|pattern| Load { size, depth, pattern, write: false })
        })
    };
    sizes.flat_map(of).collect()
}

/// For each workload, how fast it is under the policy beside how fast it is alone.
fn ratios(preset: Preset, alone: &[(Load, u64)], policy: Policy) -> Vec<f64> {
    let ratio = |(load, alone): &(Load, u64)| throughput(preset.spec(), *load, policy) as f64 / *alone as f64;
    alone.iter().map(ratio).collect()
}

fn alone(preset: Preset) -> Vec<(Load, u64)> {
    workloads().into_iter().map(|load| (load, throughput(preset.spec(), load, Policy::default()))).collect()
}

/// The best of all policies that cost no workload more than the fit may.
fn best_of_all(preset: Preset, alone: &[(Load, u64)]) -> (Policy, f64) {
    let splits = std::iter::once(None).chain((0..8).map(|power| Some((4 * KIB) << power)));
    let merges = || std::iter::once(None).chain((1..9).map(|power| Some((4 * KIB) << power)));
    let all = splits.flat_map(|split| merges().map(move |merge| Policy { split, merge }));
    let judged = all.map(|policy| (policy, ratios(preset, alone, policy)));
    let fair = judged.filter(|(_, ratios)| least(ratios) >= WORST);
    let scored = fair.map(|(policy, ratios)| (policy, mean(&ratios)));
    scored.fold((Policy::default(), 1.0), |best, one| if one.1 > best.1 { one } else { best })
}

fn fitted(preset: Preset) -> Fit {
    let measure = |load, policy, _| Ok::<_, Infallible>(throughput(preset.spec(), load, policy));
    match fit(false, 1, measure) {
        Ok(fit) => fit,
        Err(never) => match never {},
    }
}

/// Scope: each preset; all 108 workloads under all 81 policies.
#[test]
fn the_fit_is_within_5_percent_of_the_best_of_all_policies_and_costs_no_workload_more_than_3() {
    for preset in Preset::ALL {
        let (found, alone) = (fitted(preset), alone(preset));
        let of_fit = ratios(preset, &alone, found.policy);
        let (best, score) = best_of_all(preset, &alone);
        println!(
            "{preset}: fit {:?} {:.3}, worst {:.3}; best {best:?} {score:.3}",
            found.policy,
            mean(&of_fit),
            least(&of_fit)
        );
        assert!(mean(&of_fit) >= 0.95 * score, "{preset}: {:?}, best is {best:?}", found.policy);
        // The same over the workloads alone to which the best policy makes a difference.
        let of_best = ratios(preset, &alone, best);
        let matters = |ratios: &[f64]| -> Vec<f64> {
            ratios
                .iter()
                .zip(&of_best)
                .filter(|(_, best)| (**best - 1.0).abs() > 0.02)
                .map(|(ratio, _)| *ratio)
                .collect()
        };
        let (here, there) = (mean(&matters(&of_fit)), mean(&matters(&of_best)));
        println!("  {} workloads that it matters to: {here:.3}; best {there:.3}", matters(&of_best).len());
        assert!(here >= 0.95 * there, "{preset}: {:?}, best is {best:?}", found.policy);
        let worst = alone.iter().zip(&of_fit).min_by(|one, other| one.1.total_cmp(other.1));
        assert!(least(&of_fit) >= 0.97, "{preset}: {:?} costs {worst:?}", found.policy);
    }
}

#[test]
fn each_kind_of_storage_gets_what_suits_it() {
    let [nvme, _, disk, array] = Preset::ALL.map(|preset| fitted(preset).policy);
    assert!(nvme.split.is_some(), "{nvme:?}");
    assert!(disk.split.is_none() && disk.merge.is_some(), "{disk:?}");
    assert!(array.split.is_none_or(|piece| piece >= 32 * KIB), "{array:?}");
}

#[test]
fn storage_to_which_sizes_do_nothing_is_left_alone_and_so_is_noise() {
    let (mut random, mut asked) = (Rng::with_seed(1), Vec::new());
    let measure = |_, _, progress: Progress| {
        asked.push(progress);
        // A hundredth up and down.
        Ok::<_, Infallible>(random.u64(1_000_000..1_020_000))
    };
    let found = fit(true, 2, measure).unwrap_or_else(|never| match never {});
    assert_eq!(found.policy, Policy::default());
    assert_eq!((asked[0].done, asked.last().map(|last| last.done + 1)), (0, Some(asked[0].all)), "all were announced");
    assert!(found.points.iter().all(|point| point.load.write));
}

/// One round in three is disturbed, each time on another side.
#[test]
fn a_disturbance_of_one_round_changes_nothing() {
    let quiet = |load: Load, policy: Policy| throughput(Preset::Array.spec(), load, policy);
    let mut count = 0u64;
    let measure = |load, policy, _| {
        count += 1;
        let share = if count % 11 == 0 { 4 } else { 1 };
        Ok::<_, Infallible>(quiet(load, policy) / share)
    };
    let found = fit(false, 3, measure).unwrap_or_else(|never| match never {});
    assert_eq!(found.policy, fitted(Preset::Array).policy);
}

#[test]
fn a_candidate_that_costs_one_load_more_than_3_percent_is_out_whatever_others_gain() {
    let measure = |load: Load, policy: Policy, _| {
        let speed = match (policy.split, load.size, load.depth) {
            (Some(_), 65_536, 32) => 960,
            (Some(_), ..) => 2000,
            (None, ..) => 1000,
        };
        Ok::<_, Infallible>(speed)
    };
    let found = fit(false, 1, measure).unwrap_or_else(|never| match never {});
    // The smallest that leave requests of 64 KiB alone split all others.
    assert_eq!(found.policy.split, Some(64 * KIB));
}
