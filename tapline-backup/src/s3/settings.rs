//! How a bucket is reached: options, and the environment as for Amazon's own tools (docs/backup.md lists variables).
//!
//! Knows nothing of objects. Invariants: an option takes the place of every variable for the same thing, so a key of a
//! file is never mixed with a token or a role of the environment; a server is contacted without TLS only if its address
//! begins with `http://`.

use std::fs;
use std::path::Path;
use std::time::Duration;

use arguments::backup::S3Access;
use control::{in_full, printable};
use object_store::ClientOptions;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, S3ConditionalPut};
use reqwest::Certificate;

use super::{credentials, http};
use crate::failure::{Exit, Failure};

/// The variable for how long a server may be silent.
const READ_TIMEOUT: &str = "AWS_READ_TIMEOUT";

/// Settings of which one says where the key comes from.
const CREDENTIALS: [AmazonS3ConfigKey; 5] = [
    AmazonS3ConfigKey::AccessKeyId,
    AmazonS3ConfigKey::WebIdentityTokenFile,
    AmazonS3ConfigKey::ContainerCredentialsRelativeUri,
    AmazonS3ConfigKey::ContainerCredentialsFullUri,
    AmazonS3ConfigKey::MetadataEndpoint,
];

/// Further settings of the key.
const OF_KEY: [AmazonS3ConfigKey; 2] = [AmazonS3ConfigKey::SecretAccessKey, AmazonS3ConfigKey::Token];

/// Settings for the server, the most specific one first.
const ENDPOINTS: [AmazonS3ConfigKey; 2] = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];

/// Settings for the region.
const REGIONS: [AmazonS3ConfigKey; 2] = [AmazonS3ConfigKey::Region, AmazonS3ConfigKey::DefaultRegion];

/// A client for a bucket. Nothing is sent yet.
pub fn client(url: &str, bucket: &str, access: &S3Access) -> Result<AmazonS3, Failure> {
    let mut settings = of_environment(access)
        .with_bucket_name(bucket)
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        // One name for each request: not all servers know more.
        .with_disable_bulk_delete(true);
    if let Some(file) = &access.credentials {
        let found = credentials::read(file)?;
        settings = settings.with_access_key_id(found.id).with_secret_access_key(found.secret);
        settings = found.token.into_iter().fold(settings, AmazonS3Builder::with_token);
    }
    settings = access.endpoint.iter().fold(settings, AmazonS3Builder::with_endpoint);
    settings = access.region.iter().fold(settings, AmazonS3Builder::with_region);
    // Otherwise one would be requested from the metadata service of Amazon's hosts, for minutes on all others.
    if CREDENTIALS.iter().all(|key| settings.get_config_value(key).is_none()) {
        let what = format!("cannot use the target {url}: there is no key for its server");
        return Err(Failure::new(Exit::Usage, what).advise(
            "give a file with it, --credentials FILE, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for the role of \
             a host of Amazon AWS_METADATA_ENDPOINT=http://169.254.169.254",
        ));
    }
    let endpoint = ENDPOINTS.iter().find_map(|key| settings.get_config_value(key));
    let is_plain = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
    let authorities = access.ca_file.as_deref().map(authorities).transpose()?;
    settings
        .with_client_options(ClientOptions::new().with_allow_http(is_plain))
        .with_http_connector(http::Connector { silence: silence()?, authorities })
        .build()
        .map_err(|error| {
            Failure::new(Exit::Usage, format!("cannot use the target {url}: {}", in_full(&error)))
                .advise("check --endpoint, --region and --credentials, or the variables AWS_… in their place")
        })
}

/// The settings that are in the environment, as far as no option takes their place.
fn of_environment(access: &S3Access) -> AmazonS3Builder {
    let is_replaced = |key: &AmazonS3ConfigKey| {
        access.credentials.is_some() && (CREDENTIALS.contains(key) || OF_KEY.contains(key))
            || access.endpoint.is_some() && ENDPOINTS.contains(key)
            || access.region.is_some() && REGIONS.contains(key)
    };
    let variables = std::env::vars_os().filter_map(|(name, value)| {
        let name = name.to_str().filter(|name| name.starts_with("AWS_"))?.to_ascii_lowercase();
        Some((name.parse::<AmazonS3ConfigKey>().ok()?, value.into_string().ok()?))
    });
    let ours = variables.filter(|(key, _)| !is_replaced(key));
    ours.fold(AmazonS3Builder::new(), |settings, (key, value)| settings.with_config(key, value))
}

/// The certificates in a file.
fn authorities(file: &Path) -> Result<Vec<Certificate>, Failure> {
    let unusable = |why: String| {
        Failure::new(Exit::Usage, format!("cannot read certificates from {}: {why}", file.display()))
            .advise("give a file with the certificates of the authorities in PEM")
    };
    let pem = fs::read(file).map_err(|error| unusable(error.to_string()))?;
    match Certificate::from_pem_bundle(&pem) {
        Ok(found) if found.is_empty() => Err(unusable("there is none in it".to_owned())),
        found => found.map_err(|error| unusable(in_full(&error))),
    }
}

/// How long a server may be silent, from the environment.
fn silence() -> Result<Duration, Failure> {
    let Some(text) = std::env::var_os(READ_TIMEOUT) else { return Ok(http::SILENCE) };
    let parsed = text.to_str().and_then(|text| text.parse::<jiff::SignedDuration>().ok()?.try_into().ok());
    parsed.filter(|silence: &Duration| !silence.is_zero()).ok_or_else(|| {
        let what = format!("{READ_TIMEOUT} is '{}', which is no time", printable(&text.to_string_lossy()));
        Failure::new(Exit::Usage, what).advise(format!("set it as {READ_TIMEOUT}=60s"))
    })
}
