//! Checks the dependencies between packages in the manifests against the table of the design.
//!
//! Only our own packages are checked.

use super::Finding;
use super::tree::{Manifest, Tree};

/// A package, and our packages that it may depend on.
struct Arrow {
    package: &'static str,
    /// Allowed in its code.
    may_use: &'static [&'static str],
    /// Allowed additionally in its tests and benchmarks.
    tests_may_use: &'static [&'static str],
}

/// The table of all packages. A package that is missing here is a finding: every new one is decided here.
const ARROWS: &[Arrow] = &[
    Arrow { package: "arguments", may_use: &["control", "vm"], tests_may_use: &[] },
    Arrow { package: "control", may_use: &[], tests_may_use: &[] },
    Arrow { package: "logging", may_use: &[], tests_may_use: &[] },
    Arrow { package: "memory", may_use: &[], tests_may_use: &[] },
    Arrow { package: "shares", may_use: &["memory"], tests_may_use: &[] },
    Arrow { package: "stats", may_use: &["control", "memory"], tests_may_use: &[] },
    Arrow { package: "plan", may_use: &[], tests_may_use: &[] },
    Arrow { package: "periods", may_use: &[], tests_may_use: &[] },
    Arrow { package: "device", may_use: &[], tests_may_use: &[] },
    Arrow { package: "disk", may_use: &["memory"], tests_may_use: &["sim"] },
    Arrow { package: "nbd", may_use: &["disk", "memory"], tests_may_use: &["testkit"] },
    Arrow { package: "httpfile", may_use: &["control"], tests_may_use: &["testkit"] },
    Arrow { package: "backup", may_use: &[], tests_may_use: &[] },
    Arrow { package: "uring", may_use: &["device", "disk", "memory", "nbd"], tests_may_use: &[] },
    Arrow { package: "xen", may_use: &["memory"], tests_may_use: &[] },
    Arrow { package: "transport", may_use: &["disk", "memory", "nbd", "xen"], tests_may_use: &["sim", "testkit"] },
    Arrow { package: "api", may_use: &[], tests_may_use: &[] },
    Arrow { package: "repo", may_use: &["api"], tests_may_use: &[] },
    Arrow {
        package: "taplined",
        may_use: &["api", "control", "logging", "nbd", "periods", "repo", "shares", "stats", "vm"],
        tests_may_use: &["testkit"],
    },
    Arrow { package: "sim", may_use: &["disk", "memory", "plan"], tests_may_use: &[] },
    Arrow { package: "vm", may_use: &["control", "stats", "xen"], tests_may_use: &["testkit"] },
    Arrow {
        package: "tapline-disk",
        may_use: &[
            "arguments",
            "control",
            "device",
            "disk",
            "httpfile",
            "logging",
            "memory",
            "nbd",
            "plan",
            "shares",
            "stats",
            "uring",
            "transport",
            "vm",
            "xen",
        ],
        tests_may_use: &["sim", "testkit"],
    },
    Arrow {
        package: "tapline-backup",
        may_use: &["arguments", "backup", "control", "disk", "logging", "nbd", "periods", "transport", "uring"],
        tests_may_use: &["testkit"],
    },
    Arrow {
        package: "tapline",
        may_use: &["api", "arguments", "control", "logging", "stats", "vm", "xen"],
        tests_may_use: &["testkit"],
    },
    Arrow { package: "testkit", may_use: &["memory"], tests_may_use: &[] },
    Arrow { package: "testbed", may_use: &["control", "sim", "stats", "vm"], tests_may_use: &[] },
    Arrow { package: "model", may_use: &["sim", "testbed", "testkit"], tests_may_use: &[] },
    Arrow { package: "bench", may_use: &["control", "testbed", "testkit", "vm"], tests_may_use: &[] },
    Arrow { package: "xtask", may_use: &["bench", "model", "sim", "testbed"], tests_may_use: &[] },
    // The client of the benchmarks must not share code with what it measures.
    Arrow { package: "bench-client", may_use: &[], tests_may_use: &[] },
    // Compares with other programs, in its own workspace.
    Arrow { package: "tapline-oracle", may_use: &[], tests_may_use: &["disk", "memory"] },
    // Fuzz targets are tests of the parsers, in their own workspace.
    Arrow {
        package: "tapline-fuzz",
        may_use: &["disk", "memory", "sim", "testkit", "transport", "xen"],
        tests_may_use: &[],
    },
];

/// Finds dependencies in manifests that are not in the table.
pub fn check(tree: &Tree) -> Vec<Finding> {
    tree.manifests.iter().flat_map(check_package).collect()
}

fn check_package(manifest: &Manifest) -> Vec<Finding> {
    let Some(arrow) = ARROWS.iter().find(|arrow| arrow.package == manifest.name) else {
        let what = format!(
            "package {} is not in the table of xtask/src/tidy/arrows.rs: add it with what it may depend on",
            manifest.name
        );
        return vec![Finding::new(&manifest.path, manifest.line_of("package", "name"), what)];
    };
    let mut findings = Vec::new();
    for (section, name) in dependencies(&manifest.table) {
        let ours = ARROWS.iter().any(|arrow| arrow.package == name);
        let for_tests = section == "dev-dependencies" && arrow.tests_may_use.contains(&name.as_str());
        if ours && !arrow.may_use.contains(&name.as_str()) && !for_tests {
            let what = format!("{} must not depend on {name}: {}", manifest.name, allowed(arrow));
            findings.push(Finding::new(&manifest.path, manifest.line_of(section, &name), what));
        }
    }
    findings
}

fn allowed(arrow: &Arrow) -> String {
    match arrow.may_use {
        [] => "it may depend on nothing of ours".into(),
        some => format!("of ours it may depend on {}", some.join(", ")),
    }
}

/// All dependencies of a manifest, including those of single targets: the section, and the real name of the package.
fn dependencies(table: &toml::Table) -> Vec<(&'static str, String)> {
    let mut found = Vec::new();
    for section in ["dependencies", "dev-dependencies", "build-dependencies"] {
        for (key, value) in table.get(section).and_then(toml::Value::as_table).into_iter().flatten() {
            let renamed = value.get("package").and_then(toml::Value::as_str);
            found.push((section, renamed.unwrap_or(key).to_owned()));
        }
    }
    for (_, target) in table.get("target").and_then(toml::Value::as_table).into_iter().flatten() {
        found.extend(target.as_table().into_iter().flat_map(dependencies));
    }
    found
}

#[cfg(test)]
mod test {
    use std::path::Path;

    use super::*;

    fn findings(text: &str) -> Vec<String> {
        let manifest = Manifest::parse(Path::new("disk/Cargo.toml"), text.to_owned()).unwrap().unwrap();
        check_package(&manifest).iter().map(Finding::to_string).collect()
    }

    #[test]
    fn an_arrow_against_the_table_is_found_where_it_is_drawn() {
        let found =
            findings("[package]\nname = \"disk\"\n\n[dependencies]\nmemory.workspace = true\nuring.workspace = true\n");
        assert_eq!(found, ["disk/Cargo.toml:6: disk must not depend on uring: of ours it may depend on memory"]);
    }

    #[test]
    fn a_renamed_or_target_dependency_is_no_way_around() {
        let found = findings(
            "[package]\nname = \"disk\"\n[target.'cfg(unix)'.dependencies]\nengine = { package = \"uring\", path = \"../uring\" }\n",
        );
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("must not depend on uring"), "{found:?}");
    }

    #[test]
    fn tests_may_use_what_code_may_not() {
        assert!(findings("[package]\nname = \"disk\"\n[dev-dependencies]\nsim.workspace = true\n").is_empty());
        assert_eq!(findings("[package]\nname = \"disk\"\n[dependencies]\nsim.workspace = true\n").len(), 1);
    }

    #[test]
    fn an_unknown_package_is_a_finding() {
        let found = findings("[package]\nname = \"novel\"\n");
        assert!(found[0].starts_with("disk/Cargo.toml:2: package novel is not in the table"), "{found:?}");
    }
}
