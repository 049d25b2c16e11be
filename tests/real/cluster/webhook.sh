#!/bin/bash
# A validating webhook behind socat: reads one request, allows every object that is not called "unwelcome", and prints
# the name of the object on stderr.
length=0
while IFS=$'\r' read -r line && [[ -n $line ]]; do
  if [[ ${line,,} =~ ^content-length:\ *([0-9]+) ]]; then length=${BASH_REMATCH[1]}; fi
done
review=$(head -c "$length")
[[ $review =~ \"uid\":\"([^\"]*)\" ]] && uid=${BASH_REMATCH[1]}
[[ $review =~ \"name\":\"([^\"]*)\" ]] && name=${BASH_REMATCH[1]}
echo "asked of $name" >&2
allowed=true
if [[ $name == unwelcome ]]; then allowed=false; fi
answer='{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response":
  {"uid": "'$uid'", "allowed": '$allowed', "status": {"message": "node1 says no"}}}'
printf 'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s' \
  "${#answer}" "$answer"
