//! Reflection: the descriptions of the services here, for clients that have no copy of them.

use futures_util::StreamExt as _;
use futures_util::stream::BoxStream;
use prost::Message as _;
use prost_types::{FileDescriptorProto, FileDescriptorSet};
use tonic::{Code, Request, Response, Status, Streaming};

use wire::server_reflection_request::MessageRequest;
use wire::server_reflection_response::MessageResponse;
pub(super) use wire::server_reflection_server::ServerReflectionServer;
use wire::{
    ErrorResponse, FileDescriptorResponse, ListServiceResponse, ServerReflectionRequest,
    ServerReflectionResponse, ServiceResponse,
};

/// The messages of `proto/reflection.proto`, compiled.
#[allow(missing_docs, unreachable_pub, missing_debug_implementations, clippy::all, reason = "generated")]
mod wire {
    include!(concat!(env!("OUT_DIR"), "/grpc.reflection.v1.rs"));
}

/// The files that describe what this port serves, those that they import first.
#[derive(Debug, Clone)]
pub(super) struct Reflection {
    files: std::sync::Arc<[FileDescriptorProto]>,
}

/// The request as one to the newest version: the older one has other names and the same messages.
pub(super) fn in_its_newest_version<B>(mut request: http::Request<B>) -> http::Request<B> {
    if request.uri().path() == OLDER {
        *request.uri_mut() = http::Uri::from_static(NEWEST);
    }
    request
}

impl Default for Reflection {
    fn default() -> Self {
        // They were written by the build of this very program.
        let files = FileDescriptorSet::decode(FILES).map(|set| set.file).unwrap_or_default();
        Self { files: files.into() }
    }
}

#[tonic::async_trait]
impl wire::server_reflection_server::ServerReflection for Reflection {
    type ServerReflectionInfoStream = BoxStream<'static, Result<ServerReflectionResponse, Status>>;

    async fn server_reflection_info(
        &self,
        request: Request<Streaming<ServerReflectionRequest>>,
    ) -> Result<Response<Self::ServerReflectionInfoStream>, Status> {
        let here = self.clone();
        // One answer for each question: a reader that takes none is asked for none.
        let answers = request.into_inner().map(move |asked| asked.map(|asked| here.answer(asked)));
        Ok(Response::new(answers.boxed()))
    }
}

impl Reflection {
    fn answer(&self, asked: ServerReflectionRequest) -> ServerReflectionResponse {
        let told = match &asked.message_request {
            Some(MessageRequest::ListServices(_)) => {
                let services = self.files.iter().flat_map(|file| {
                    file.service
                        .iter()
                        .map(|one| ServiceResponse { name: format!("{}.{}", file.package(), one.name()) })
                });
                MessageResponse::ListServicesResponse(ListServiceResponse { service: services.collect() })
            }
            Some(MessageRequest::FileByFilename(name)) => self.file(|file| file.name() == name),
            Some(MessageRequest::FileContainingSymbol(symbol)) => self.file(|file| has(file, symbol)),
            None => unserved(Code::Unimplemented, "this is not answered here"),
        };
        ServerReflectionResponse {
            valid_host: asked.host.clone(),
            original_request: Some(asked),
            message_response: Some(told),
        }
    }

    /// That file, and all that it may import.
    fn file(&self, is: impl Fn(&FileDescriptorProto) -> bool) -> MessageResponse {
        let Some(found) = self.files.iter().find(|file| is(file)) else {
            return unserved(Code::NotFound, "there is no such file or symbol");
        };
        let imports =
            self.files.iter().filter(|file| found.dependency.iter().any(|name| name == file.name()));
        let files = [found].into_iter().chain(imports).map(FileDescriptorProto::encode_to_vec);
        MessageResponse::FileDescriptorResponse(FileDescriptorResponse {
            file_descriptor_proto: files.collect(),
        })
    }
}

/// Whether a file has a symbol, such as a service, its method, or a message.
fn has(file: &FileDescriptorProto, symbol: &str) -> bool {
    let Some(inside) = symbol.strip_prefix(file.package()).and_then(|rest| rest.strip_prefix('.')) else {
        return false;
    };
    let first = inside.split('.').next();
    let messages = file.message_type.iter().map(prost_types::DescriptorProto::name);
    let services = file.service.iter().map(prost_types::ServiceDescriptorProto::name);
    messages.chain(services).any(|name| Some(name) == first)
}

fn unserved(code: Code, why: &str) -> MessageResponse {
    MessageResponse::ErrorResponse(ErrorResponse { error_code: code.into(), error_message: why.into() })
}

const FILES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/channelz.bin"));
const OLDER: &str = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
const NEWEST: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_and_their_files_are_told_and_what_is_not_there_is_not_found() {
        let here = Reflection::default();
        let ask = |request| {
            let asked = ServerReflectionRequest { host: String::new(), message_request: Some(request) };
            here.answer(asked).message_response.unwrap()
        };
        let MessageResponse::ListServicesResponse(list) = ask(MessageRequest::ListServices(String::new()))
        else {
            panic!()
        };
        let names: Vec<_> = list.service.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["grpc.channelz.v1.Channelz", "grpc.reflection.v1.ServerReflection"]);
        for symbol in
            ["grpc.channelz.v1.Channelz", "grpc.channelz.v1.Channelz.GetServers", "google.protobuf.Timestamp"]
        {
            let told = ask(MessageRequest::FileContainingSymbol(symbol.into()));
            let MessageResponse::FileDescriptorResponse(files) = told else { panic!("{symbol}: {told:?}") };
            let first = FileDescriptorProto::decode(&*files.file_descriptor_proto[0]).unwrap();
            assert!(symbol.starts_with(first.package()), "{symbol}");
        }
        for symbol in ["grpc.channelz.v1.Nothing", "grpc.channelz.v1", ""] {
            let told = ask(MessageRequest::FileContainingSymbol(symbol.into()));
            assert!(
                matches!(&told, MessageResponse::ErrorResponse(error) if error.error_code == 5),
                "{symbol}: {told:?}"
            );
        }
    }
}
