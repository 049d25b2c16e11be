//! A ServiceAccount token as a JSON Web Token: what it claims, and its signature by a published key.

use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, ECDSA_P521_SHA512_FIXED, EcdsaVerificationAlgorithm,
    RSA_PKCS1_2048_8192_SHA256, RsaPublicKeyComponents, UnparsedPublicKey,
};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use tunnel_proto::printable::printable;

/// What a token claims. Nothing of it is proved before kube-apiserver or a key confirms the token.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Claims {
    #[serde(default)]
    pub(crate) iss: String,
    #[serde(default)]
    sub: String,
    #[serde(default)]
    aud: Vec<String>,
    pub(crate) exp: u64,
    #[serde(default)]
    nbf: u64,
    #[serde(default, rename = "kubernetes.io")]
    bound: BoundTo,
}

/// The objects that a token is bound to.
#[derive(Debug, Clone, Default, Deserialize)]
struct BoundTo {
    pod: Option<BoundPod>,
}

/// The pod that a token is bound to.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct BoundPod {
    pub(crate) name: String,
    pub(crate) uid: String,
}

impl Claims {
    /// Reads the claims of a token, and refuses what kube-apiserver would refuse too, or what we do not accept: so no
    /// stranger makes us ask. Returns them with the pod. `now` is in seconds since 1970.
    ///
    /// # Errors
    ///
    /// Returns what is wrong. It contains no more of the token than its subject and audiences.
    pub(crate) fn check(
        token: &str,
        subject: &str,
        audience: &str,
        now: u64,
    ) -> Result<(Self, BoundPod), String> {
        if token.len() > MAX_TOKEN_BYTES {
            return Err(format!("it is longer than {MAX_TOKEN_BYTES} bytes"));
        }
        let claims = token.split('.').nth(1).and_then(decoded::<Self>);
        let claims = claims.ok_or("it is no token of a ServiceAccount")?;
        if claims.sub != subject {
            let other = printable(&claims.sub);
            return Err(format!("it is for {other:?}, and server.service_account allows only {subject}"));
        }
        if !claims.aud.iter().any(|one| one == audience) {
            let others = printable(&claims.aud.join(" "));
            return Err(format!(
                "its audience is {others:?} instead of {audience:?} of server.service_account"
            ));
        }
        if claims.exp.saturating_add(LEEWAY) < now {
            return Err("it has ended; check that the kubelet renews it, and the clocks".to_owned());
        }
        if claims.nbf > now + LEEWAY {
            return Err("it is not valid yet; check the clocks".to_owned());
        }
        let pod = claims.bound.pod.clone().ok_or("it is bound to no pod; mount it as a projected volume")?;
        Ok((claims, pod))
    }
}

/// The keys that kube-apiserver publishes, with which it signs tokens.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct KeySet {
    keys: Vec<PublishedKey>,
}

/// A published key. Its members are those of JSON Web Keys.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
struct PublishedKey {
    kid: String,
    kty: String,
    alg: Option<String>,
    crv: String,
    n: String,
    e: String,
    x: String,
    y: String,
}

/// The head of a token. Its algorithm is not read: the key decides.
#[derive(Deserialize)]
struct Head {
    kid: String,
}

impl KeySet {
    /// Returns true if one of the keys has signed the token.
    pub(crate) fn has_signed(&self, token: &str) -> bool {
        let Some((signed, signature)) = token.rsplit_once('.') else { return false };
        let head = token.split('.').next().and_then(decoded::<Head>);
        let key = head.and_then(|head| self.keys.iter().find(|key| key.kid == head.kid));
        let signature = BASE64_URL_SAFE_NO_PAD.decode(signature);
        key.zip(signature.ok())
            .and_then(|(key, signature)| key.verify(signed.as_bytes(), &signature))
            .is_some()
    }
}

impl PublishedKey {
    fn verify(&self, signed: &[u8], signature: &[u8]) -> Option<()> {
        let decode = |part: &str| BASE64_URL_SAFE_NO_PAD.decode(part).ok();
        let (alg, curve): (_, Option<&EcdsaVerificationAlgorithm>) = match (&*self.kty, &*self.crv) {
            ("RSA", _) => ("RS256", None),
            ("EC", "P-256") => ("ES256", Some(&ECDSA_P256_SHA256_FIXED)),
            ("EC", "P-384") => ("ES384", Some(&ECDSA_P384_SHA384_FIXED)),
            ("EC", "P-521") => ("ES512", Some(&ECDSA_P521_SHA512_FIXED)),
            _ => return None,
        };
        if self.alg.as_ref().is_some_and(|own| own != alg) {
            return None;
        }
        match curve {
            None => {
                let key = RsaPublicKeyComponents { n: decode(&self.n)?, e: decode(&self.e)? };
                key.verify(&RSA_PKCS1_2048_8192_SHA256, signed, signature).ok()
            }
            Some(curve) => {
                // A point that is not compressed.
                let point = [vec![4], decode(&self.x)?, decode(&self.y)?].concat();
                UnparsedPublicKey::new(curve, point).verify(signed, signature).ok()
            }
        }
    }
}

/// Decodes a part of a token.
fn decoded<T: DeserializeOwned>(part: &str) -> Option<T> {
    serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(part).ok()?).ok()
}

/// Kubernetes' tokens have about 1,200 bytes.
const MAX_TOKEN_BYTES: usize = 8192;
/// Tolerated difference of clocks, in seconds.
const LEEWAY: u64 = 60;
